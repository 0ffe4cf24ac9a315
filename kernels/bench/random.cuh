// Counter-based numbers: a value is a function of the seed and its own index, so the same launch gives
// the same values again.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cstdint>

// Steele, Lea and Flood's SplitMix64, as a function of the counter.
__device__ inline uint64_t hash(uint64_t seed, uint64_t index) {
  uint64_t x = seed + (index + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// 24 bits: uniform in (0, 1].
__device__ inline float uniform(uint32_t bits) { return ((bits >> 8) + 1) * 0x1p-24f; }

// Two independent normal(0, 1), by Box and Muller.
__device__ inline float2 normal_pair(uint64_t bits) {
  const float radius = sqrtf(-2 * __logf(uniform(uint32_t(bits))));
  float sine, cosine;
  __sincosf(6.2831853f * uniform(uint32_t(bits >> 32)), &sine, &cosine);
  return make_float2(radius * cosine, radius * sine);
}

__device__ inline void put(float* out, uint64_t pair, float a, float b) {
  reinterpret_cast<float2*>(out)[pair] = make_float2(a, b);
}
__device__ inline void put(__half* out, uint64_t pair, float a, float b) {
  reinterpret_cast<__half2*>(out)[pair] = __floats2half2_rn(a, b);
}
__device__ inline void put(__nv_bfloat16* out, uint64_t pair, float a, float b) {
  reinterpret_cast<__nv_bfloat162*>(out)[pair] = __floats2bfloat162_rn(a, b);
}
__device__ inline void put(__nv_fp8_e4m3* out, uint64_t pair, float a, float b) {
  out[2 * pair] = __nv_fp8_e4m3(a);
  out[2 * pair + 1] = __nv_fp8_e4m3(b);
}
