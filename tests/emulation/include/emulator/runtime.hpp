// Launches: each block an OS thread, each of its threads a fiber with a stack of its own (x86-64 and
// AArch64, System V's calling convention).
#pragma once

#include <emulator/device.hpp>

#include <cstdio>
#include <cstdlib>
#include <link.h>
#include <numeric>
#include <sched.h>
#include <sys/mman.h>

constinit thread_local dim threadIdx, blockIdx;
alignas(128) constinit thread_local uint4 dynamic[(227 << 10) / sizeof(uint4)];

namespace emulator {

constexpr size_t kStack = 64 << 10;
constexpr char kCanary[] = "the low end of a stack";

// Keeps what a call must not change, goes on with another stack, and comes back when somebody goes on
// with this one.
extern "C" void emulator_switch(void** ours, void* theirs);
#if defined(__x86_64__)
constexpr int kSaved = 6;
asm(R"(
.pushsection .text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.popsection
)");
#elif defined(__aarch64__)
constexpr int kSaved = 19;
asm(R"(
.pushsection .text
.globl emulator_switch
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp d8, d9, [sp, #80]
  stp d10, d11, [sp, #96]
  stp d12, d13, [sp, #112]
  stp d14, d15, [sp, #128]
  stp x29, x30, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp d8, d9, [sp, #80]
  ldp d10, d11, [sp, #96]
  ldp d12, d13, [sp, #112]
  ldp d14, d15, [sp, #128]
  ldp x29, x30, [sp, #144]
  add sp, sp, #160
  ret
.popsection
)");
#else
#error "the emulator switches stacks on x86-64 and AArch64 alone"
#endif

struct Cluster {
  unsigned blocks;
  std::mutex mutex;
  unsigned arrived = 0, ended = 0;
  std::atomic<unsigned> phase{0}, started{0}, stopped{0};
  std::vector<char*> shared_of;
  std::vector<std::atomic<bool>> gone;  // members that have ended, whose memory nobody may use

  explicit Cluster(unsigned blocks) : blocks(blocks), shared_of(blocks), gone(blocks) {}
  // With the mutex. Members that have ended hold up nobody.
  void go_on_if_all_are_there() {
    if (arrived > 0 && arrived + ended == blocks) arrived = 0, phase++;
  }
};

enum class State { runs, at_barrier, in_exchange, waits, ended };

struct Block {
  struct Fiber {
    void* stack;
    State state = State::runs;
    // What it says in an exchange, of two that may overlap, and in which.
    uint64_t said[2];
    int turn = 0;
    const void* what = nullptr;
    // How often it has arrived at the cluster's barrier, and waited for it.
    unsigned arrivals = 0, waits = 0;
  };
  std::vector<Fiber> fibers;
  Cluster& cluster;
  unsigned rank, dynamic_bytes, arrived = 0;
  std::function<void()> kernel;
  std::mt19937 random;
  std::vector<emulator::Copy> copies;
  bool anybody = false, anybody_before = false;  // at a barrier, and at the last one
  void* scheduler = nullptr;
  unsigned current = 0;

  Block(unsigned threads, Cluster& cluster, unsigned rank, unsigned bytes, std::function<void()> kernel, unsigned seed)
      : fibers(threads), cluster(cluster), rank(rank), dynamic_bytes(bytes), kernel(std::move(kernel)), random(seed) {}

  [[noreturn]] static void fail(const char* what) {
    fprintf(stderr, "%s\n", what);
    abort();
  }
  Fiber& fiber() { return fibers[current]; }
  void stop(State why) {
    fiber().state = why;
    emulator_switch(&fiber().stack, scheduler);
  }
  unsigned count(State state) const {
    return (unsigned)std::count_if(fibers.begin(), fibers.end(), [&](const Fiber& f) { return f.state == state; });
  }
  void release(State state) {
    for (Fiber& f : fibers) {
      if (f.state == state) f.state = State::runs;
    }
  }

  static void begin();

  // An arrival holds up nobody; the block has arrived once all threads have that have not ended.
  void arrive_if_all_have() {
    const auto behind = [&](const Fiber& f) { return f.state != State::ended && f.arrivals <= arrived; };
    const auto ahead = [&](const Fiber& f) { return f.arrivals > arrived; };
    if (std::any_of(fibers.begin(), fibers.end(), behind) || std::none_of(fibers.begin(), fibers.end(), ahead)) return;
    const std::lock_guard<std::mutex> lock(cluster.mutex);
    arrived++, cluster.arrived++, cluster.go_on_if_all_are_there();
  }
  const void* at_barrier() const {
    for (const Fiber& f : fibers) {
      if (f.state == State::at_barrier) return f.what;
    }
    return nullptr;
  }

  void prepare(char* stacks) {
    for (size_t t = 0; t < fibers.size(); t++) {
      memcpy(stacks + kStack * t, kCanary, sizeof(kCanary));
      // A frame that the switch takes for its own, and returns from to begin().
      void** top = reinterpret_cast<void**>(stacks + kStack * (t + 1));
#if defined(__x86_64__)
      top -= 2;
#else
      top -= 1;
#endif
      *top = reinterpret_cast<void*>(&begin);
      top -= kSaved;
      std::fill_n(top, kSaved, nullptr);
      fibers[t].stack = top;
    }
  }

  // A warp's fibers, from a random one on, and once all are in an exchange it is over.
  bool run_warp(unsigned first) {
    bool any = false;
    const unsigned from = random() % 32;
    for (unsigned i = 0; i < 32; i++) {
      const unsigned t = first + (from + i) % 32;
      if (fibers[t].state != State::runs) continue;
      current = t, threadIdx.x = t;
      emulator_switch(&scheduler, fibers[t].stack);
      any = true;
    }
    const auto in = [&](State state) {
      return std::count_if(&fibers[first], &fibers[first] + 32, [&](const Fiber& f) { return f.state == state; });
    };
    if (in(State::in_exchange) == 32) {
      for (unsigned t = first; t < first + 32; t++) {
        if (fibers[t].what != fibers[first].what) fail("threads of a warp that take different steps together");
      }
      for (unsigned t = first; t < first + 32; t++) fibers[t].state = State::runs;
      any = true;
    } else if (in(State::in_exchange) > 0 && in(State::in_exchange) + in(State::ended) == 32) {
      fail("a step of a warp of which some threads have ended");
    }
    return any;
  }

  void run() {
    const unsigned threads = (unsigned)fibers.size();
    const size_t size = kStack * threads;
    char* stacks = static_cast<char*>(
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) fail("no memory for stacks");
    prepare(stacks);
    std::vector<unsigned> warps(threads / 32);
    std::iota(warps.begin(), warps.end(), 0u);
    // No launch of the tests takes as long.
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(240);
    for (unsigned passes = 1;; passes++) {
      if (passes % 1024 == 0 && std::chrono::steady_clock::now() > limit) fail("nothing comes of this");
      std::shuffle(warps.begin(), warps.end(), random);
      for (unsigned w : warps) {
        for (unsigned times = random() % 6 + 1; times > 0 && run_warp(w * 32); times--) {
        }
      }
      const unsigned ended = count(State::ended);
      if (ended == threads) break;
      arrive_if_all_have();
      for (Fiber& f : fibers) {
        if (f.state == State::waits && (int)(cluster.phase - f.waits) >= 0) f.state = State::runs;
      }
      if (count(State::runs) || count(State::waits)) {
        // Perhaps all wait for what another member sends or does.
        if (passes % 64 == 0 || !count(State::runs)) sched_yield();
      } else if (count(State::at_barrier) + ended == threads) {
        for (const Fiber& f : fibers) {
          if (f.state == State::at_barrier && f.what != at_barrier()) fail("threads at different barriers");
        }
        anybody_before = anybody, anybody = false;
        release(State::at_barrier);
      } else {
        fail("threads wait for different things");
      }
    }
    for (unsigned t = 0; t < threads; t++) {
      if (memcmp(stacks + kStack * t, kCanary, sizeof(kCanary))) fail("a stack that was too small");
    }
    munmap(stacks, size);
    const std::lock_guard<std::mutex> lock(cluster.mutex);
    cluster.ended++, cluster.go_on_if_all_are_there();
  }
};

thread_local Block* block;

void Block::begin() {
  block->kernel();
  block->stop(State::ended);
  fail("a thread that has ended goes on");
}

void sync_threads() {
  static const char what = 0;
  block->fiber().what = &what;
  block->stop(State::at_barrier);
}
bool sync_threads_or(bool said) {
  static const char what = 0;
  block->fiber().what = &what;
  block->anybody |= said;
  block->stop(State::at_barrier);
  return block->anybody_before;
}
void exchange(const void* what, unsigned mask, uint64_t said, uint64_t (&all)[32]) {
  if (mask != ~0u) Block::fail("a step of a part of a warp");
  block->fiber().what = what;
  const int turn = block->fiber().turn;
  block->fiber().said[turn] = said, block->fiber().turn = 1 - turn;
  block->stop(State::in_exchange);
  const unsigned first = block->current / 32 * 32;
  for (unsigned lane = 0; lane < 32; lane++) all[lane] = block->fibers[first + lane].said[turn];
}
void yield() { block->stop(State::runs); }
std::vector<Copy>& copies() { return block->copies; }
unsigned random() { return block->random(); }
unsigned dynamic_bytes() { return block->dynamic_bytes; }
unsigned blocks_of_cluster() { return block->cluster.blocks; }
unsigned rank_in_cluster() { return block->rank; }
void cluster_arrive() { block->fiber().arrivals++; }
void cluster_wait() {
  block->fiber().waits++;
  block->stop(State::waits);
}
// The thread-local memory of this OS thread, in which all of shared memory is.
struct Memory {
  char* begin;
  size_t size;

  static Memory find() {
    Memory memory = {nullptr, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* object, size_t, void* to) {
          for (int i = 0; i < object->dlpi_phnum; i++) {
            if (object->dlpi_phdr[i].p_type != PT_TLS) continue;
            *(Memory*)to = {(char*)object->dlpi_tls_data, object->dlpi_phdr[i].p_memsz};
          }
          return 1;  // The program is the first.
        },
        &memory);
    if (!memory.begin) Block::fail("no thread-local memory");
    return memory;
  }
};
thread_local Memory own_memory;

// Shared memory lies alike in every OS thread.
void* of_member(const void* object, unsigned rank) {
  const Cluster& cluster = block->cluster;
  if (rank >= cluster.blocks) Block::fail("a member that the cluster does not have");
  if (cluster.gone[rank]) Block::fail("the memory of a member that has ended");
  const size_t at = (const char*)object - own_memory.begin;
  if (at >= own_memory.size) Block::fail("an object of a member's that is not in shared memory");
  return (char*)object - (char*)dynamic + block->cluster.shared_of[rank];
}

// A cluster of `blocks` for each of `rows`, one after the other, or all at once. All shared memory is filled
// with garbage before, and again when its block has ended.
template <class Kernel>
void launch(unsigned rows, unsigned blocks, unsigned threads, unsigned dynamic_bytes, unsigned seed, Kernel kernel,
            bool at_once = false) {
  if (dynamic_bytes > sizeof(dynamic)) Block::fail("more shared memory than a block has");
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::thread> running;
  const auto join = [&] {
    for (std::thread& block : running) block.join();
    running.clear();
  };
  for (unsigned row = 0; row < rows; row++) {
    clusters.push_back(std::make_unique<Cluster>(blocks));
    for (unsigned rank = 0; rank < blocks; rank++) {
      running.emplace_back([&cluster = *clusters.back(), &kernel, row, rank, blocks, threads, dynamic_bytes, seed] {
        const Memory memory = Memory::find();
        memset(memory.begin, 0xa5, memory.size);
        Block own(threads, cluster, rank, dynamic_bytes, kernel, seed + row * blocks + rank);
        own_memory = memory, block = &own, blockIdx.x = row * blocks + rank;
        cluster.shared_of[rank] = (char*)dynamic;
        cluster.started++;
        while (cluster.started < blocks) sched_yield();
        own.run();
        if (!own.copies.empty()) Block::fail("the end of a block whose bulk copies are on their way");
        cluster.gone[rank] = true;
        const char* const end = (const char*)dynamic + sizeof(dynamic);
        if (std::any_of((const char*)dynamic + dynamic_bytes, end, [](char c) { return c != (char)0xa5; })) {
          Block::fail("a write beyond the dynamic shared memory of the launch");
        }
        memset(dynamic, 0x5a, sizeof(dynamic));
        // Messages that are still on their way to it may arrive.
        cluster.stopped++;
        while (cluster.stopped < blocks) sched_yield();
      });
    }
    if (!at_once) join();
  }
  join();
}

}  // namespace emulator
