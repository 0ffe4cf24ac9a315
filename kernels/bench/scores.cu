// Ragged score rows for the benches of selection, made on the device: 34 GB of them need not be
// uploaded. One kernel for all laws; a value is a function of the seed, its row and its column.
#include "random.cuh"

enum Law { kSink, kNormal, kUniform, kTies, kAlias, kEqual };

// How far apart the high values of kAlias lie: the widest stride of a fixed sampled view.
constexpr uint32_t kAliasStride = 128;

__device__ float score(int law, float normal, uint32_t bits, uint32_t i, uint32_t length, uint64_t row) {
  switch (law) {
    case kSink: {
      // Raised where attention raises them: over half of the top 2048 of 64K and more lie in the first
      // and the last tenth.
      const float first = float(i) / (0.06f * length), last = float(length - 1 - i) / (0.05f * length);
      return normal + 1.2f * __expf(-first) + 1.6f * __expf(-last);
    }
    case kNormal:
      return normal;
    case kUniform:
      return uniform(bits);
    case kTies:
      return rintf(normal * 64) / 64;
    case kAlias:
      // A residue class of its own for each row: what a strided view sees is all high, or all low.
      return normal + (i % kAliasStride == row % kAliasStride ? 8 : 0);
    default:
      return 1;
  }
}

// Rows [rows, pitch], of which row r is valid in [0, ends[r]). What lies beyond is NaN or greater than
// every score: an op that took it for one would not pass its check. The pitch is even.
template <typename T>
__device__ void scores(T* out, uint64_t rows, uint64_t pitch, const uint32_t* ends, uint64_t seed,
                       int law) {
  for (uint64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const uint32_t length = ends[row];
    for (uint32_t j = blockIdx.x * blockDim.x + threadIdx.x; j < pitch / 2; j += gridDim.x * blockDim.x) {
      const uint64_t bits = hash(seed, row << 32 | j);
      const float2 normal = normal_pair(bits);
      const float a = score(law, normal.x, uint32_t(bits), 2 * j, length, row);
      const float b = score(law, normal.y, uint32_t(bits >> 32), 2 * j + 1, length, row);
      put(out, (row * pitch) / 2 + j, 2 * j < length ? a : 1e9f,
          2 * j + 1 < length ? b : __int_as_float(0x7fc00000));
    }
  }
}

#define SCORES(T, name)                                                                               \
  extern "C" __global__ void scores_##name(T* out, uint64_t rows, uint64_t pitch,                     \
                                           const uint32_t* ends, uint64_t seed, int law) {            \
    scores(out, rows, pitch, ends, seed, law);                                                        \
  }

SCORES(float, f32)
SCORES(__half, f16)
SCORES(__nv_bfloat16, bf16)
