// What the members of a thread-block cluster say to each other.
#pragma once

#ifdef CANDLE_TOPK_EMULATOR
#include <emulator/cluster.hpp>
#else

// Which cluster this is.
__device__ __forceinline__ unsigned cluster_index() {
  unsigned index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// A barrier that orders nothing but the arrivals: the other kind waits for all that a thread has written, on
// its way to memory.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  __syncwarp();  // `aligned`: all threads of a warp are to execute it together.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// The other half of it.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// What members send each other. A barrier of the cluster is a fence for the whole device, waits for
// every store to reach L2 and empties L1; what is sent arrives, and is waited for, by itself.
struct Mail {
  unsigned long long barrier;

  // By one thread, before the team's first barrier. So many say in each round what will have been sent.
  __device__ __forceinline__ void open(unsigned senders = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(address(&barrier)),
                 "r"(senders)
                 : "memory");
  }
  // By one thread, once a round: what will have been sent to this member. It may come before.
  __device__ __forceinline__ void expect(unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes)
                 : "memory");
  }
  // By one thread of a sender, once a round: what this member will have been sent by it.
  __device__ __forceinline__ void expect_at(unsigned member, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(of(&barrier, member)),
                 "r"(bytes)
                 : "memory");
  }
  // By every thread: until all of it is there. Rounds are counted from 0. It acquires for the block alone: what is
  // sent lands in our own shared memory, and the cluster's kind would empty L1.
  __device__ __forceinline__ void wait(unsigned round) {
    asm volatile(
        "{\n.reg .pred there;\n"
        "wait_%=: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
        "@there bra done_%=;\nbra wait_%=;\ndone_%=:\n}" ::"r"(address(&barrier)), "r"(round & 1)
        : "memory");
  }
  // Copies whole vectors from global memory into our own, as part of what is expected.
  __device__ __forceinline__ void fetch(uint4* to, const void* from, unsigned bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
        "l"(from), "r"(bytes), "r"(address(&barrier))
        : "memory");
  }
  // Puts words where `member` has `to`, which is ours.
  __device__ __forceinline__ void send(unsigned* to, unsigned word, unsigned member) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     of(to, member)), "r"(word), "r"(of(&barrier, member))
                 : "memory");
  }
  __device__ __forceinline__ void send(unsigned long long* to, unsigned long long word, unsigned member) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                     of(to, member)), "l"(word), "r"(of(&barrier, member))
                 : "memory");
  }
  __device__ __forceinline__ void send(uint4* to, uint4 words, unsigned member) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     of(to, member)), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w),
                 "r"(of(&barrier, member))
                 : "memory");
  }

 private:
  static __device__ __forceinline__ unsigned address(const void* object) {
    return (unsigned)__cvta_generic_to_shared(object);
  }
  static __device__ __forceinline__ unsigned of(const void* object, unsigned member) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(object)), "r"(member));
    return there;
  }
};

#endif
