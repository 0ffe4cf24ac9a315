// Sums over a warp, all of whose lanes call.
#pragma once

// Over this lane and those before it.
__device__ __forceinline__ unsigned inclusive_sum(unsigned x) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    // A shuffle says itself whether there was a lane to read from.
    asm volatile(
        "{\n.reg .pred there;\n.reg .u32 before;\n"
        "shfl.sync.up.b32 before|there, %0, %1, 0, 0xffffffff;\n"
        "@there add.u32 %0, %0, before;\n}"
        : "+r"(x)
        : "r"(lanes));
  }
  return x;
}
