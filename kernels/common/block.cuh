// Reductions and scans over a block of kThreads threads. All threads call, all get the result.
// Operands may be any type made of 4-byte words. Not inlined: the driver compiles all of this when a
// kernel is first loaded, and they are called many times.
#pragma once

#include <string.h>

#include "ptx.cuh"

// `kThreads` is the including file's: the forms of a kernel differ in it.
constexpr int kWarps = kThreads / 32;
static_assert((kWarps & (kWarps - 1)) == 0 && kWarps <= 32, "the second step of a reduction is one warp wide");

template <class V>
__device__ __forceinline__ V shuffle_xor(V v, int lanes) {
  static_assert(sizeof(V) % 4 == 0, "whole words only");
  unsigned words[sizeof(V) / 4];
  memcpy(words, &v, sizeof(V));
#pragma unroll
  for (int i = 0; i < sizeof(V) / 4; i++) words[i] = __shfl_xor_sync(~0u, words[i], lanes);
  memcpy(&v, words, sizeof(V));
  return v;
}

template <class V>
__device__ __forceinline__ V shuffle_up(V v, int lanes) {
  static_assert(sizeof(V) % 4 == 0, "whole words only");
  unsigned words[sizeof(V) / 4];
  memcpy(words, &v, sizeof(V));
#pragma unroll
  for (int i = 0; i < sizeof(V) / 4; i++) words[i] = __shfl_up_sync(~0u, words[i], lanes);
  memcpy(&v, words, sizeof(V));
  return v;
}

template <class V>
__device__ __forceinline__ V shuffle(V v, int lane) {
  static_assert(sizeof(V) % 4 == 0, "whole words only");
  unsigned words[sizeof(V) / 4];
  memcpy(words, &v, sizeof(V));
#pragma unroll
  for (int i = 0; i < sizeof(V) / 4; i++) words[i] = __shfl_sync(~0u, words[i], lane);
  memcpy(&v, words, sizeof(V));
  return v;
}

// Over each `kWidth` lanes.
template <int kWidth = 32, class V, class Op>
__device__ __forceinline__ V warp_reduce(V v, Op op) {
#pragma unroll
  for (int lanes = kWidth / 2; lanes > 0; lanes /= 2) v = op(v, shuffle_xor(v, lanes));
  return v;
}

template <class V, class Op>
__device__ __noinline__ V block_reduce(V v, Op op) {
  __shared__ V parts[kWarps];
  v = warp_reduce(v, op);
  __syncthreads();  // An earlier call may still be reading.
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_reduce<kWarps>(parts[threadIdx.x % kWarps], op);
}

// The sum over the threads before this one, and over all. `add` is exact, so any order serves.
template <class V, class Add>
__device__ __noinline__ V block_exclusive_sum(V v, V zero, Add add, V* total) {
  __shared__ V parts[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  V inclusive = v;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const V below = shuffle_up(inclusive, lanes);
    if (lane >= lanes) inclusive = add(inclusive, below);
  }
  V before = shuffle_up(inclusive, 1);
  if (lane == 0) before = zero;
  __syncthreads();
  if (lane == 31) parts[warp] = inclusive;
  __syncthreads();
  const V part = lane < kWarps ? parts[lane] : zero;
  *total = warp_reduce(part, add);
  const V earlier = warp_reduce(lane < warp ? part : zero, add);
  return add(earlier, before);
}
