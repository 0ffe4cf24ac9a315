// Launches: each block an OS thread, each of its threads a fiber with a stack of its own (x86-64 and
// AArch64, System V's calling convention).
#pragma once

#include <emulator/device.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <sched.h>
#include <sys/mman.h>
#include <thread>
#include <vector>

constinit thread_local dim threadIdx, blockIdx;
alignas(128) constinit thread_local uint4 dynamic[(227 << 10) / sizeof(uint4)];

namespace emulator {

constexpr size_t kStack = 64 << 10;

// Keeps what a call must not change, goes on with another stack, and comes back when somebody goes on
// with this one.
extern "C" void emulator_switch(void** ours, void* theirs);
#if defined(__x86_64__)
constexpr int kSaved = 6;
asm(R"(
.text
.globl emulator_switch
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
)");
#elif defined(__aarch64__)
constexpr int kSaved = 19;
asm(R"(
.text
.globl emulator_switch
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

  explicit Cluster(unsigned blocks) : blocks(blocks), shared_of(blocks) {}
  // With the mutex. Members that have ended hold up nobody.
  void go_on_if_all_are_there() {
    if (arrived > 0 && arrived + ended == blocks) arrived = 0, phase++;
  }
};

enum class State { runs, at_barrier, in_exchange, arrives, waits, ended };

struct Block {
  struct Fiber {
    void* stack;
    State state = State::runs;
    // What it says in an exchange, of two that may overlap.
    uint64_t said[2];
    int turn = 0;
  };
  std::vector<Fiber> fibers;
  Cluster& cluster;
  unsigned rank, dynamic_bytes, phase_waited_for = 0;
  std::function<void()> kernel;
  std::mt19937 random;
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

  void prepare(char* stacks) {
    for (size_t t = 0; t < fibers.size(); t++) {
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
    for (unsigned long long idle = 0;;) {
      std::shuffle(warps.begin(), warps.end(), random);
      for (unsigned w : warps) {
        for (unsigned times = random() % 6 + 1; times > 0 && run_warp(w * 32); times--) {
        }
      }
      const unsigned ended = count(State::ended);
      if (ended == threads) break;
      if (count(State::runs)) {
        // Perhaps all wait for what another member sends.
        if (++idle % 64 == 0) sched_yield();
        if (idle > 100'000'000) fail("nothing comes of this");
        continue;
      }
      const auto all = [&](State state) { return count(state) > 0 && count(state) + ended == threads; };
      if (all(State::at_barrier)) {
        anybody_before = anybody, anybody = false;
        release(State::at_barrier);
      } else if (all(State::arrives)) {
        const std::lock_guard<std::mutex> lock(cluster.mutex);
        phase_waited_for = cluster.phase + 1;
        cluster.arrived++, cluster.go_on_if_all_are_there();
        release(State::arrives);
      } else if (all(State::waits)) {
        if ((int)(cluster.phase - phase_waited_for) >= 0) release(State::waits);
        else if (++idle > 100'000'000) fail("a barrier of the cluster that not all come to");
        else sched_yield();
      } else {
        fail("threads wait for different things");
      }
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

void sync_threads() { block->stop(State::at_barrier); }
bool sync_threads_or(bool said) {
  block->anybody |= said;
  block->stop(State::at_barrier);
  return block->anybody_before;
}
void exchange(uint64_t said, uint64_t (&all)[32]) {
  const int turn = block->fiber().turn;
  block->fiber().said[turn] = said, block->fiber().turn = 1 - turn;
  block->stop(State::in_exchange);
  const unsigned first = block->current / 32 * 32;
  for (unsigned lane = 0; lane < 32; lane++) all[lane] = block->fibers[first + lane].said[turn];
}
void yield() { block->stop(State::runs); }
unsigned dynamic_bytes() { return block->dynamic_bytes; }
unsigned blocks_of_cluster() { return block->cluster.blocks; }
unsigned rank_in_cluster() { return block->rank; }
void cluster_arrive() { block->stop(State::arrives); }
void cluster_wait() { block->stop(State::waits); }
// Shared memory is thread-local, which lies alike in every OS thread.
void* of_member(const void* object, unsigned rank) {
  return (char*)object - (char*)dynamic + block->cluster.shared_of[rank];
}

// A cluster of `blocks` for each of `rows`, one after the other. Shared memory is filled with garbage
// before.
template <class Kernel>
void launch(unsigned rows, unsigned blocks, unsigned threads, unsigned dynamic_bytes, unsigned seed, Kernel kernel) {
  if (dynamic_bytes > sizeof(dynamic)) Block::fail("more shared memory than a block has");
  for (unsigned row = 0; row < rows; row++) {
    Cluster cluster(blocks);
    std::vector<std::thread> members;
    for (unsigned rank = 0; rank < blocks; rank++) {
      members.emplace_back([&, rank] {
        Block own(threads, cluster, rank, dynamic_bytes, kernel, seed + row * blocks + rank);
        block = &own, blockIdx.x = row * blocks + rank;
        memset(dynamic, 0xa5, sizeof(dynamic));
        cluster.shared_of[rank] = (char*)dynamic;
        cluster.started++;
        while (cluster.started < blocks) sched_yield();
        own.run();
        // Another may still read it.
        cluster.stopped++;
        while (cluster.stopped < blocks) sched_yield();
      });
    }
    for (std::thread& member : members) member.join();
  }
}

}  // namespace emulator
