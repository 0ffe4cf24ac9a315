// What these kernels say in PTX itself, but for the words between the members of a cluster (cluster.cuh).
// The emulator of tests/emulation has the same functions for the CPU.
#pragma once

#ifdef CANDLE_TOPK_EMULATOR
#include <emulator/ptx.hpp>
#else

// The dynamic shared memory of the block, and its size. It begins with a line, whatever comes before it: what is copied to
// the middle of one takes longer to arrive.
extern __shared__ __align__(128) uint4 dynamic[];
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

// Adds 1 to a word of shared memory. A constant 1 would make this an instruction that first looks for lanes of
// one word, which takes thrice the time where there are few.
__device__ __forceinline__ void shared_count(unsigned* word) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"((unsigned)__cvta_generic_to_shared(word)), "r"(min(gridDim.x, 1u))
               : "memory");
}

// Adds what the lane so far below has, if there is one. All lanes call.
__device__ __forceinline__ void add_from_below(unsigned* x, int lanes) {
  // A shuffle says itself whether there was a lane to read from.
  asm volatile(
      "{\n.reg .pred there;\n.reg .u32 before;\n"
      "shfl.sync.up.b32 before|there, %0, %1, 0, 0xffffffff;\n"
      "@there add.u32 %0, %0, before;\n}"
      : "+r"(*x)
      : "r"(lanes));
}

__device__ __forceinline__ void prefetch_to_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// The greater; NaN where either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The sign bit where x is above `below`, a number or -inf: of their difference. No NaN has it: this device's own, of NaN or
// of -inf twice, is a positive one.
__device__ __forceinline__ unsigned sign_above(float below, float x) { return __float_as_uint(__fsub_rn(below, x)); }
// The same of two, in each half.
template <class Pair>
__device__ __forceinline__ unsigned signs_above(Pair below, Pair x) {
  const Pair difference = __hsub2(below, x);
  return *reinterpret_cast<const unsigned*>(&difference);
}

// 2^x within 2 units in the last place.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, where a unit in the last place is of no account.
__device__ __forceinline__ float about_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Adds a weight where x < threshold, by one instruction.
__device__ __forceinline__ void add_below(float* sum, float weight, float x, float threshold) {
  asm("{\n.reg .pred below;\nsetp.lt.f32 below, %1, %2;\n@below add.f32 %0, %0, %3;\n}"
      : "+f"(*sum)
      : "f"(x), "f"(threshold), "f"(weight));
}

// All bits where a > b, else none. To be added up, where a condition for each addition would take its own time.
__device__ __forceinline__ unsigned all_if_above(unsigned a, unsigned b) {
  unsigned all;
  asm("set.gt.u32.u32 %0, %1, %2;" : "=r"(all) : "r"(a), "r"(b));
  return all;
}
__device__ __forceinline__ unsigned all_if_above(unsigned long long a, unsigned long long b) {
  unsigned all;
  asm("set.gt.u32.u64 %0, %1, %2;" : "=r"(all) : "l"(a), "l"(b));
  return all;
}

// A f32 above 0 as f64, by its bits.
__device__ __forceinline__ double widened(unsigned bits) {
  double y;
  asm("{\n.reg .u64 wide;\nmad.wide.u32 wide, %1, 0x20000000, 0x3800000000000000;\nmov.b64 %0, wide;\n}" : "=d"(y) : "r"(bits));
  return y;
}

// Values of which the compiler is to know nothing from here on.
__device__ __forceinline__ void forget_value(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget_value(unsigned& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget_value(float& x) { asm volatile("" : "+f"(x)); }

#endif
