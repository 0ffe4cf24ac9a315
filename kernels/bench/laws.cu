// Logits for the benches, made on the device: a batch of 2 GB need not be uploaded, and what an op in
// place has destroyed is back in the time of one write.
#include "random.cuh"

__device__ void put_one(float* out, float a) { *out = a; }
__device__ void put_one(__nv_bfloat16* out, float a) { *out = __float2bfloat16(a); }

// normal(mean, deviation), two at a time by Box and Muller.
template <typename T>
__device__ void normal(T* out, uint64_t pairs, uint64_t seed, float mean, float deviation) {
  const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs; i += step) {
    const float2 two = normal_pair(hash(seed, i));
    put(out, i, mean + deviation * two.x, mean + deviation * two.y);
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

// Keys and queries of an indexer.
extern "C" __global__ void normal_fp8(__nv_fp8_e4m3* out, uint64_t pairs, uint64_t seed, float mean,
                                      float deviation) {
  normal(out, pairs, seed, mean, deviation);
}
