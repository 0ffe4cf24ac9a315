// What these kernels say in PTX itself, but for the words between the members of a cluster (cluster.cuh).
// The emulator of tests/emulator has the same functions for the CPU.
#pragma once

#ifdef CANDLE_TOPK_EMULATOR
#include <emulator/ptx.hpp>
#else

// The dynamic shared memory of the block, and its size.
__device__ __forceinline__ uint4* dynamic_shared() {
  extern __shared__ uint4 dynamic[];
  return dynamic;
}
__device__ __forceinline__ unsigned dynamic_shared_bytes() {
  unsigned bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

// Adds to a word of shared memory, and gives what it was. Where all that is known of it is a pointer,
// atomicAdd would take the way of global memory.
__device__ __forceinline__ unsigned shared_add(unsigned* word, unsigned by) {
  unsigned was;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;"
               : "=r"(was)
               : "r"((unsigned)__cvta_generic_to_shared(word)), "r"(by)
               : "memory");
  return was;
}

__device__ __forceinline__ void prefetch_to_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// The greater; NaN where either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 2^x within 2 units in the last place.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Adds a weight where x < threshold, by one instruction.
__device__ __forceinline__ void add_below(float* sum, float weight, float x, float threshold) {
  asm("{\n.reg .pred below;\nsetp.lt.f32 below, %1, %2;\n@below add.f32 %0, %0, %3;\n}"
      : "+f"(*sum)
      : "f"(x), "f"(threshold), "f"(weight));
}

// Values of which the compiler is to know nothing from here on.
__device__ __forceinline__ void forget_value(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget_value(unsigned& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget_value(float& x) { asm volatile("" : "+f"(x)); }

#endif
