// A team of blocks that works on one row: one block (C = 1), or on sm_90 a thread-block cluster
// of up to C, a power of two, whose members read each other's shared memory.
//
// Every member makes the same decisions from the same numbers: what a member alone knows (sums over
// its slice of the row, gathered elements) is made common right after it is found.
#pragma once

#include <cooperative_groups.h>

#include "block.cuh"
#include "cluster.cuh"

template <int C>
struct Team {
  static __device__ __forceinline__ unsigned rank() {
    return cooperative_groups::this_cluster().block_rank();
  }
  static __device__ __forceinline__ unsigned size() {
    return cooperative_groups::this_cluster().num_blocks();
  }
  static __device__ __forceinline__ unsigned log_size() { return 31 - __clz(size()); }
  // A barrier for all threads of the team, ordering their shared memory.
  static __device__ __forceinline__ void sync() { cooperative_groups::this_cluster().sync(); }
  // The first barrier in two halves: nothing may be sent to a member before it runs.
  static __device__ __forceinline__ void arrive() { cluster_arrive_relaxed(); }
  static __device__ __forceinline__ void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  // Where member `rank` has this object of shared memory.
  template <class V>
  static __device__ __forceinline__ V* at(V* object, unsigned rank) {
    return cooperative_groups::this_cluster().map_shared_rank(object, rank);
  }
};

// What members send each other. A barrier of the cluster is a fence for the whole device, waits for
// every store to reach L2 and empties L1; what is sent arrives, and is waited for, by itself.
struct Mail {
  unsigned long long barrier;

  // By one thread, before the team's first barrier.
  __device__ __forceinline__ void open() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(address(&barrier))
                 : "memory");
  }
  // By one thread, once a round: what will have been sent to this member. It may come before.
  __device__ __forceinline__ void expect(unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes)
                 : "memory");
  }
  // By every thread: until all of it is there. Rounds are counted from 0.
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

template <>
struct Team<1> {
  static __device__ __forceinline__ unsigned rank() { return 0; }
  static __device__ __forceinline__ unsigned size() { return 1; }
  static __device__ __forceinline__ unsigned log_size() { return 0; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
  static __device__ __forceinline__ void arrive() {}
  static __device__ __forceinline__ void wait() {}
  template <class V>
  static __device__ __forceinline__ V* at(V* object, unsigned) { return object; }
};

// What each member says, for all to read: values[r] is member r's. `op` combines them in the order
// of ranks, so even a rounding one gives every member the same.
template <int C, class V, class Op>
__device__ __noinline__ V team_combine(V v, Op op) {
  if constexpr (C == 1) {
    return v;
  } else {
    __shared__ V said;
    Team<C>::sync();  // An earlier call may still be reading.
    if (threadIdx.x == 0) said = v;
    Team<C>::sync();
    V all = *Team<C>::at(&said, 0);
#pragma unroll 1
    for (int r = 1; r < Team<C>::size(); r++) all = op(all, *Team<C>::at(&said, r));
    return all;
  }
}

template <int C, class V, class Op>
__device__ __forceinline__ V team_reduce(V v, Op op) {
  return team_combine<C>(block_reduce(v, op), op);
}

// The sum over the members before this one, and over all, of what each block says.
template <int C, class V, class Add>
__device__ __noinline__ V team_exclusive_sum(V v, V zero, Add add, V* total) {
  if constexpr (C == 1) {
    *total = v;
    return zero;
  } else {
    __shared__ V said;
    Team<C>::sync();
    if (threadIdx.x == 0) said = v;
    Team<C>::sync();
    V before = zero, all = zero;
#pragma unroll 1
    for (int r = 0; r < Team<C>::size(); r++) {
      if (r == Team<C>::rank()) before = all;
      all = add(all, *Team<C>::at(&said, r));
    }
    *total = all;
    return before;
  }
}
