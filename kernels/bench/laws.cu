// Logits for the benches, made on the device: a batch of 2 GB need not be uploaded, and what an op in
// place has destroyed is back in the time of one write.
//
// Counter-based: a value is a function of the seed and its own index, so the same launch gives the
// same logits again.
#include <cuda_bf16.h>
#include <cstdint>

// Steele, Lea and Flood's SplitMix64, as a function of the counter.
__device__ uint64_t hash(uint64_t seed, uint64_t index) {
  uint64_t x = seed + (index + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// 24 bits: uniform in (0, 1].
__device__ float uniform(uint32_t bits) { return ((bits >> 8) + 1) * 0x1p-24f; }

__device__ void put(float* out, uint64_t pair, float a, float b) {
  reinterpret_cast<float2*>(out)[pair] = make_float2(a, b);
}
__device__ void put(__nv_bfloat16* out, uint64_t pair, float a, float b) {
  reinterpret_cast<__nv_bfloat162*>(out)[pair] = __floats2bfloat162_rn(a, b);
}
__device__ void put_one(float* out, float a) { *out = a; }
__device__ void put_one(__nv_bfloat16* out, float a) { *out = __float2bfloat16(a); }

// normal(mean, deviation), two at a time by Box and Muller.
template <typename T>
__device__ void normal(T* out, uint64_t pairs, uint64_t seed, float mean, float deviation) {
  const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs; i += step) {
    const uint64_t bits = hash(seed, i);
    const float radius = deviation * sqrtf(-2 * __logf(uniform(uint32_t(bits))));
    float sine, cosine;
    __sincosf(6.2831853f * uniform(uint32_t(bits >> 32)), &sine, &cosine);
    put(out, i, mean + radius * cosine, mean + radius * sine);
  }
}

constexpr int kPeaks = 64;

// Replaces kPeaks logits of each row by uniform(6, 18). One block a row, one thread a peak; where two
// fall on one position the later one counts, whichever thread comes first.
template <typename T>
__device__ void peaks(T* out, int64_t vocab, uint64_t seed) {
  __shared__ int64_t at[kPeaks];
  const uint64_t bits = hash(~seed, uint64_t(blockIdx.x) * kPeaks + threadIdx.x);
  at[threadIdx.x] = (bits >> 32) % vocab;
  __syncthreads();
  for (int later = threadIdx.x + 1; later < kPeaks; ++later)
    if (at[later] == at[threadIdx.x]) return;
  put_one(out + blockIdx.x * vocab + at[threadIdx.x], 6 + 12 * uniform(uint32_t(bits)));
}

#define LAWS(T, name)                                                                                 \
  extern "C" __global__ void normal_##name(T* out, uint64_t pairs, uint64_t seed, float mean,         \
                                           float deviation) {                                         \
    normal(out, pairs, seed, mean, deviation);                                                        \
  }                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kPeaks)                                                \
      peaks_##name(T* out, int64_t vocab, uint64_t seed) {                                            \
    peaks(out, vocab, seed);                                                                          \
  }

LAWS(float, f32)
LAWS(__nv_bfloat16, bf16)
