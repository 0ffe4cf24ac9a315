// What an op is held against: the least time in which its bytes can be read, and be copied. And what
// keeps a measurement clean: outputs that hold nothing, and a device that is busy while launches queue.
#include <cstdint>

// One pass over n vectors of 16 bytes, kInFlight of them in flight in each thread.
template <int kInFlight, typename Use>
__device__ void pass(const uint4* in, uint64_t n, Use use) {
  const uint64_t tile = uint64_t(blockDim.x) * kInFlight;
  for (uint64_t base = blockIdx.x * tile + threadIdx.x; base < n; base += gridDim.x * tile) {
    uint4 vector[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (base + j * blockDim.x < n) vector[j] = __ldg(in + base + j * blockDim.x);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (base + j * blockDim.x < n) use(base + j * blockDim.x, vector[j]);
  }
}

// A store that depends on every byte, and that no logits cause: without it the compiler would drop the
// loads.
template <int kInFlight>
__device__ void read(const uint4* in, uint64_t n, uint4* out) {
  uint32_t any = 0;
  pass<kInFlight>(in, n, [&](uint64_t, uint4 v) { any |= v.x | v.y | v.z | v.w; });
  if (any == 1) out->x = any;
}

template <int kInFlight>
__device__ void copy(const uint4* in, uint64_t n, uint4* out) {
  pass<kInFlight>(in, n, [&](uint64_t i, uint4 v) { out[i] = v; });
}

#define FLOORS(in_flight)                                                                             \
  extern "C" __global__ void read_##in_flight(const uint4* in, uint64_t n, uint4* out) {              \
    read<in_flight>(in, n, out);                                                                      \
  }                                                                                                   \
  extern "C" __global__ void copy_##in_flight(const uint4* in, uint64_t n, uint4* out) {              \
    copy<in_flight>(in, n, out);                                                                      \
  }

FLOORS(1)
FLOORS(4)
FLOORS(8)

extern "C" __global__ void fill(uint32_t* out, uint64_t n, uint32_t word) {
  const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) out[i] = word;
}

// Keeps the stream busy for so many nanoseconds.
extern "C" __global__ void busy(uint64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - start < ns);
}
