// A team of blocks that works on one row: one block (C = 1), or on sm_90 a thread-block cluster
// of up to C, a power of two or three times one, whose members read each other's shared memory.
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
  // Rounded up.
  static __device__ __forceinline__ unsigned log_size() { return 32 - __clz(size() - 1); }
  // Which team this is.
  static __device__ __forceinline__ unsigned index() { return cluster_index(); }
  // A barrier for all threads of the team, ordering their shared memory.
  static __device__ __forceinline__ void sync() { cooperative_groups::this_cluster().sync(); }
  // The first barrier in two halves: nothing may be sent to a member before it runs.
  static __device__ __forceinline__ void arrive() { cluster_arrive_relaxed(); }
  static __device__ __forceinline__ void wait() { cluster_wait(); }
  // Where member `rank` has this object of shared memory.
  template <class V>
  static __device__ __forceinline__ V* at(V* object, unsigned rank) {
    return cooperative_groups::this_cluster().map_shared_rank(object, rank);
  }
};

template <>
struct Team<1> {
  static __device__ __forceinline__ unsigned rank() { return 0; }
  static __device__ __forceinline__ unsigned size() { return 1; }
  static __device__ __forceinline__ unsigned index() { return blockIdx.x; }
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
