// Sums over a warp, all of whose lanes call.
#pragma once

#include "ptx.cuh"

// Over this lane and those before it.
__device__ __forceinline__ unsigned inclusive_sum(unsigned x) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) add_from_below(&x, lanes);
  return x;
}
