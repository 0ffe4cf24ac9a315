// kernels/common/cluster.cuh on the CPU. What is sent arrives at once; how long it takes is left to the
// random order of the warps. A bulk copy arrives while somebody waits, after the others or before, so that what is
// read without a wait is not there.
#pragma once

#include <emulator/device.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

inline unsigned cluster_index() { return blockIdx.x / emulator::blocks_of_cluster(); }
inline void cluster_arrive_relaxed() {
  __syncwarp();
  emulator::cluster_arrive();
}
inline void cluster_wait() { emulator::cluster_wait(); }

// An mbarrier: a phase ends when all senders have said what is to come, and all of it has.
struct Mail {
  std::atomic_flag locked;
  int senders, unsaid, bytes;
  unsigned phase;

  void open(unsigned all = 1) {
    locked.clear();
    senders = unsaid = (int)all, bytes = 0, phase = 0;
  }
  void expect(unsigned more) {
    change([&] { bytes += (int)more, unsaid--; });
  }
  void expect_at(unsigned member, unsigned more) { at(this, member)->expect(more); }
  void wait(unsigned round) {
    bool over = false;
    while (true) {
      change([&] { over = (phase & 1) != (round & 1); });
      if (over) return;
      deliver_some();
      emulator::yield();
    }
  }
  void fetch(uint4* to, const void* from, unsigned size) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || size % 16) fail("a bulk copy that is not aligned");
    emulator::copies().push_back({to, from, size, this});
  }
  void send(unsigned* to, unsigned word, unsigned member) { put(to, word, member); }
  void send(unsigned long long* to, unsigned long long word, unsigned member) { put(to, word, member); }
  void send(uint4* to, uint4 words, unsigned member) { put(to, words, member); }

 private:
  // One of the block's bulk copies, now and then.
  static void deliver_some() {
    auto& copies = emulator::copies();
    if (copies.empty() || emulator::random() % 64) return;
    const size_t which = emulator::random() % copies.size();
    const emulator::Copy copy = copies[which];
    copies.erase(copies.begin() + which);
    memcpy(copy.to, copy.from, copy.size);
    ((Mail*)copy.mail)->change([&](Mail& its) { its.bytes -= (int)copy.size; });
  }
  static void fail(const char* what) {
    fprintf(stderr, "%s\n", what);
    abort();
  }
  template <class V>
  static V* at(V* object, unsigned member) {
    if (member >= emulator::blocks_of_cluster()) fail("a member that the cluster does not have");
    return (V*)emulator::of_member(object, member);
  }
  template <class V>
  void put(V* to, V what, unsigned member) {
    *at(to, member) = what;
    at(this, member)->change([&](Mail& its) { its.bytes -= (int)sizeof(what); });
  }
  template <class F>
  void change(F f) {
    for (unsigned times = 0; locked.test_and_set(std::memory_order_acquire); times++) {
      if (times > 1'000'000'000) fail("mail of a box that was never opened");
    }
    if constexpr (std::is_invocable_v<F, Mail&>) f(*this);
    else f();
    if (unsaid == 0 && bytes == 0) unsaid = senders, phase++;
    locked.clear(std::memory_order_release);
  }
};
