// Attention over positions by tensor cores, on any device from compute capability 8.0.
//
// 1. A block takes one or two tiles of 16 heads, with four warps each, and 64 keys at a time (32 of
//    long ones). Keys and values are gathered by asynchronous copies of 16 bytes into one of two
//    buffers, while the other is worked on. Rows are padded by 16 bytes, so that no two rows of a
//    matrix load meet in a bank.
// 2. Where a key lies takes up to two reads that depend on each other, of the list and of the block
//    table. They are made one iteration apart, three and two iterations ahead of the key's own.
// 3. The four warps share the keys for the scores, and the columns of the values for their sums. The
//    weights pass through shared memory.
// 4. A key that has no place is filled with zeros and scored -inf. A run of keys that all have none
//    is skipped.

#pragma once
#include "../common/pipeline.cuh"
#include "../common/products.cuh"
#include "sparse.cuh"

namespace sparse {

// Eight numbers to shared memory one by one, of which the first so many exist and the others are 0.
template <typename T>
__device__ inline void copy(uint32_t to, const T* from, int exist) {
  uint32_t x[4];
  for (int i = 0; i < 4; i++) {
    float low = 2 * i < exist ? wide(from[2 * i]) : 0.f;
    float high = 2 * i + 1 < exist ? wide(from[2 * i + 1]) : 0.f;
    x[i] = pair<T>(low, high);
  }
  put_16(to, make_uint4(x[0], x[1], x[2], x[3]));
}

template <int kSlice, int kSlices>
struct Slices {
  __device__ static void copy(uint32_t to, const uint8_t* from, bool exists) {
    copy_async<128 * kSlice, 128 * kSlice>(to, from, exists);
    if constexpr (kSlice + 1 < kSlices) Slices<kSlice + 1, kSlices>::copy(to, from, exists);
  }
};

// Vectors to rows of shared memory: eight threads a row, 128 bytes at a time. `at` says where each
// begins. `whole`: they are as long as the rows and lie at multiples of 16 bytes.
template <typename T, int kDim, int kRows, int kPitch, int kThreads, typename At>
__device__ inline void gather_rows(uint32_t to, const T* from, const T* somewhere, int dim, bool whole, int tid,
                                   At at) {
  int piece = tid % 8;
  to += tid / 8 * kPitch + piece * 16;
  if (whole) {
#pragma unroll
    for (int row = 0; row < kRows; row += kThreads / 8) {
      int64_t offset = at(row + tid / 8);
      const T* vector = offset >= 0 ? from + offset + piece * 8 : aligned_down(somewhere);
      Slices<0, kDim / 64>::copy(to + row * kPitch, reinterpret_cast<const uint8_t*>(vector), offset >= 0);
    }
  } else {
    for (int row = 0; row < kRows; row += kThreads / 8) {
      int64_t offset = at(row + tid / 8);
      for (int d = piece * 8; d < kDim; d += 64) {
        int exist = offset >= 0 ? min(max(dim - d, 0), 8) : 0;
        copy(to + row * kPitch + 2 * (d - piece * 8), from + offset + d, exist);
      }
    }
  }
}

// kKeyDim, kValueDim: the greatest dimensions of keys and values, multiples of 64; shorter ones are filled up
// with zeros. kShared: the values are the first numbers of the keys. kTiles of 16 heads.
template <int kKeys_, int kValues_, bool kShared_, int kTiles_>
struct Shape {
  static constexpr int kKeyDim = kKeys_, kValueDim = kValues_, kTiles = kTiles_;
  static constexpr bool kShared = kShared_;
  static constexpr int kThreads = 128 * kTiles;
  static constexpr int kKeys = kKeyDim <= 128 ? 64 : 32;
  static constexpr int kKeyPitch = 2 * kKeyDim + 16;
  static constexpr int kValuePitch = kShared ? kKeyPitch : 2 * kValueDim + 16;
  static constexpr int kWeightPitch = 2 * kKeys + 16;
  static constexpr int kStage = kKeys * (kKeyPitch + (kShared ? 0 : kValuePitch));
  static constexpr int kRing = 4;  // of places of keys
  // In shared memory, one behind the other:
  static constexpr int kQueries = 0;
  static constexpr int kStages = kQueries + 16 * kTiles * kKeyPitch;
  static constexpr int kWeights = kStages + 2 * kStage;
  static constexpr int kMaxima = kWeights + 2 * 16 * kTiles * kWeightPitch;
  static constexpr int kPlaces = kMaxima + 16 * kTiles * 16;
  static constexpr int kBytes = kPlaces + 2 * kRing * kKeys * 8;
};

template <typename T, typename S>
__device__ void attend_mma(const Request& r) {
  constexpr int kKeys = S::kKeys, kOwn = kKeys / 4;          // keys of a warp
  constexpr int kColumns = S::kValueDim / 4;                 // of a warp
  constexpr int kSecond = 16 * S::kTiles * S::kWeightPitch;  // to the second terms of the weights
  extern __shared__ __align__(16) uint8_t memory[];
  uint32_t base = shared_address(memory);
  float4* maxima = reinterpret_cast<float4*>(memory + S::kMaxima);
  int64_t* key_at = reinterpret_cast<int64_t*>(memory + S::kPlaces);
  int64_t* value_at = key_at + S::kRing * kKeys;

  int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  int tile = warp / 4, part = warp % 4;
  int64_t local = r.split ? blockIdx.x / r.segments : blockIdx.x;
  int first = r.split ? blockIdx.x % r.segments : 0;
  int past = r.split ? first + 1 : r.segments;
  Unit unit(r, r.first_unit + local);
  Finder finder(r, unit.row, unit.kv_head);
  const T* queries = static_cast<const T*>(r.q) + unit.row * r.q_row + unit.first_head * r.q_head;
  const T* keys = static_cast<const T*>(r.keys.at) + unit.kv_head * r.keys.head;
  const T* values = static_cast<const T*>(r.values.at) + unit.kv_head * r.values.head;

  // Blocks of keys, counted from the first of this block's segments.
  int64_t begin = first * r.segment;
  int64_t end = min(past * r.segment, finder.keys);
  int blocks = end > begin ? static_cast<int>((end - begin + kKeys - 1) / kKeys) : 0;
  int segment_blocks = static_cast<int>(r.segment / kKeys);

  bool whole_keys = (r.aligned & 2) && r.key_dim == S::kKeyDim;
  bool whole_values = (r.aligned & 4) && r.value_dim == S::kValueDim;
  gather_rows<T, S::kKeyDim, 16 * S::kTiles, S::kKeyPitch, S::kThreads>(
      base + S::kQueries, queries, queries, r.key_dim, (r.aligned & 1) && r.key_dim == S::kKeyDim, tid,
      [&](int head) { return head < unit.heads ? head * r.q_head : kNowhere; });

  auto gather = [&](int block) {
    uint32_t stage = base + S::kStages + block % 2 * S::kStage;
    const int64_t* at = key_at + block % S::kRing * kKeys;
    gather_rows<T, S::kKeyDim, kKeys, S::kKeyPitch, S::kThreads>(stage, keys, queries, r.key_dim, whole_keys, tid,
                                                                 [&](int key) { return at[key]; });
    if constexpr (!S::kShared) {
      at = value_at + block % S::kRing * kKeys;
      gather_rows<T, S::kValueDim, kKeys, S::kValuePitch, S::kThreads>(stage + kKeys * S::kKeyPitch, values,
                                                                       queries, r.value_dim, whole_values, tid,
                                                                       [&](int key) { return at[key]; });
    }
    copies_commit();
  };
  auto number = [&](int block) { return begin + int64_t(block) * kKeys + tid; };
  auto place = [&](int block, int64_t position, int64_t outer) {
    int at = block % S::kRing * kKeys + tid;
    key_at[at] = Finder::at(r, r.keys, position, outer);
    if (!S::kShared) value_at[at] = Finder::at(r, r.values, position, outer);
  };

  uint32_t entry = kNone;
  bool finds = tid < kKeys;
  if (finds) {
    for (int block = 0; block < 2; block++) {
      int64_t i = number(block);
      int64_t position = finder.position(r, i, finder.entry(r, i));
      place(block, position, finder.outer(r, position));
    }
    entry = finder.entry(r, number(2));
  }
  __syncthreads();
  gather(0);

  constexpr int kPairs = kColumns / 8;
  float sum[kPairs][4], run[kPairs][4];
  Running running[2];
  float max[2], weight[2];
#pragma unroll
  for (int j = 0; j < kPairs; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) sum[j][e] = run[j][e] = 0.f;
  max[0] = max[1] = minus_infinity();
  weight[0] = weight[1] = 0.f;

  int row = lane / 4;
  uint32_t query = base + S::kQueries + (tile * 16 + lane % 16) * S::kKeyPitch + lane / 16 * 16;
  uint32_t weights = base + S::kWeights + tile * 16 * S::kWeightPitch;
  float* most = reinterpret_cast<float*>(maxima + tile * 16);
  bool any = false;  // of this segment's keys, so far

  for (int block = 0; block < blocks; block++) {
    copies_wait<0>();
    bool valid = finds && key_at[block % S::kRing * kKeys + tid] >= 0;
    bool seen = __syncthreads_or(valid);
    if (block + 1 < blocks) gather(block + 1);
    int64_t position = kNowhere, outer = 0;
    if (finds) {
      position = finder.position(r, number(block + 2), entry);
      outer = finder.outer(r, position);
      entry = finder.entry(r, number(block + 3));
    }
    if (seen) {
      any = true;
      uint32_t stage = base + S::kStages + block % 2 * S::kStage;
      constexpr int kGroups = kOwn / 8;
      float score[kGroups][2][4] = {};
      if constexpr (kOwn == 16) {
        uint32_t key = stage + (part * 16 + lane % 8 + lane / 16 * 8) * S::kKeyPitch + lane / 8 % 2 * 16;
#pragma unroll
        for (int k = 0; k < S::kKeyDim / 16; k++) {
          uint32_t a[4], b[4];
          load_matrices(a, query + 32 * k);
          load_matrices(b, key + 32 * k);
          multiply_16x8<T>(score[0][k % 2], a, b[0], b[1]);
          multiply_16x8<T>(score[1][k % 2], a, b[2], b[3]);
        }
      } else {
        uint32_t key = stage + (part * 8 + lane % 8) * S::kKeyPitch + lane / 8 * 16;
#pragma unroll 6
        for (int k = 0; k < S::kKeyDim / 16; k += 2) {
          uint32_t a[4], c[4], b[4];
          load_matrices(a, query + 32 * k);
          load_matrices(c, query + 32 * k + 32);
          load_matrices(b, key + 32 * k);
          multiply_16x8<T>(score[0][0], a, b[0], b[1]);
          multiply_16x8<T>(score[0][1], c, b[2], b[3]);
        }
      }
      float both[2] = {minus_infinity(), minus_infinity()};
      const int64_t* at = key_at + block % S::kRing * kKeys + part * kOwn + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kGroups; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float s = (score[j][0][e] + score[j][1][e]) * r.scale;
          s = at[8 * j + e % 2] >= 0 ? s : minus_infinity();
          score[j][0][e] = s;
          both[e / 2] = greater(both[e / 2], s);
        }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        both[i] = greatest_of_row(both[i]);
        if (lane % 4 == 0) most[(row + 8 * i) * 4 + part] = both[i];
      }
      __syncthreads();
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float4 four = maxima[tile * 16 + row + 8 * i];
        both[i] = greater(greater(four.x, four.y), greater(four.z, four.w));
        both[i] = greater(both[i], max[i]);
        scale[i] = power(max[i] - reference(both[i]));
        max[i] = both[i];
        weight[i] *= scale[i];
      }
#pragma unroll
      for (int j = 0; j < kGroups; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float x = power(score[j][0][2 * i] - reference(max[i]));
          float y = power(score[j][0][2 * i + 1] - reference(max[i]));
          weight[i] += x + y;
          uint32_t to = weights + (row + 8 * i) * S::kWeightPitch + 2 * (part * kOwn + 8 * j + lane % 4 * 2);
          uint32_t first_term = pair<T>(x, y);
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(first_term) : "memory");
          if constexpr (Terms<T>::kCount == 2)
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + kSecond), "r"(second_term(x, y, first_term))
                         : "memory");
        }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kPairs; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[j][e] *= scale[e / 2];
      uint32_t weighed = weights + lane % 16 * S::kWeightPitch + lane / 16 * 16;
      uint32_t value = stage + (S::kShared ? 0 : kKeys * S::kKeyPitch) +
                       (lane % 8 + lane / 8 % 2 * 8) * S::kValuePitch + 2 * (part * kColumns + lane / 16 * 8);
#pragma unroll
      for (int k = 0; k < kKeys / 16; k++) {
        uint32_t a[4], c[4];
        load_matrices(a, weighed + 32 * k);
        if constexpr (Terms<T>::kCount == 2) load_matrices(c, weighed + kSecond + 32 * k);
#pragma unroll
        for (int j = 0; j < kColumns / 16; j++) {
          uint32_t b[4];
          load_matrices_across(b, value + k * 16 * S::kValuePitch + 32 * j);
          multiply_16x8<T>(sum[2 * j], a, b[0], b[1]);
          multiply_16x8<T>(sum[2 * j + 1], a, b[2], b[3]);
          if constexpr (Terms<T>::kCount == 2) {
            multiply_16x8<T>(sum[2 * j], c, b[0], b[1]);
            multiply_16x8<T>(sum[2 * j + 1], c, b[2], b[3]);
          }
        }
      }
    }
    if (finds) place(block + 2, position, outer);

    bool last = block + 1 == blocks || (block + 1) % segment_blocks == 0;
    if (last && any) {
      // The sums of the four warps, in their order.
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; i++) {
        weight[i] = sum_of_row(weight[i]);
        if (lane % 4 == 0) most[(row + 8 * i) * 4 + part] = weight[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float4 four = maxima[tile * 16 + row + 8 * i];
        weight[i] = (four.x + four.y) + (four.z + four.w);
      }
      if (r.split) break;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float own, other;
        if (running[i].merge(max[i], weight[i], own, other))
#pragma unroll
          for (int j = 0; j < kPairs; j++)
#pragma unroll
            for (int e = 2 * i; e < 2 * i + 2; e++) run[j][e] = Running::merged(run[j][e], own, sum[j][e], other);
        max[i] = minus_infinity();
        weight[i] = 0.f;
      }
#pragma unroll
      for (int j = 0; j < kPairs; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[j][e] = 0.f;
      any = false;
    }
  }
  copies_wait<0>();

  int column = part * kColumns + lane % 4 * 2;
  if (r.split) {
    float* slot = r.parts + int64_t(blockIdx.x) * slot_floats(r);
    float* sums = slot + int64_t(r.slot_heads) * r.slot_columns;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int head = tile * 16 + row + 8 * i;
      if (head >= unit.heads) continue;
      if (part == 0 && lane % 4 == 0) {
        sums[head] = max[i];
        sums[r.slot_heads + head] = weight[i];
      }
#pragma unroll
      for (int j = 0; j < kPairs; j++) {
        float2 two = make_float2(sum[j][2 * i], sum[j][2 * i + 1]);
        *reinterpret_cast<float2*>(slot + head * r.slot_columns + column + 8 * j) = two;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int head = tile * 16 + row + 8 * i;
    if (head >= unit.heads) continue;
    int row_head = unit.first_head + head;
    float sink = r.sink ? r.sink[row_head * r.sink_stride] : 0.f;
    float share = running[i].share(r.sink != nullptr, sink);
    T* out = static_cast<T*>(r.out) + unit.row * r.out_row + row_head * r.out_head + column;
#pragma unroll
    for (int j = 0; j < kPairs; j++) {
      float x = running[i].finished(run[j][2 * i], share);
      float y = running[i].finished(run[j][2 * i + 1], share);
      if (r.aligned & 8) {
        if (column + 8 * j < r.value_dim) *reinterpret_cast<uint32_t*>(out + 8 * j) = pair<T>(x, y);
      } else {
        if (column + 8 * j < r.value_dim) out[8 * j] = narrow<T>(x);
        if (column + 8 * j + 1 < r.value_dim) out[8 * j + 1] = narrow<T>(y);
      }
    }
    if (part == 0 && lane % 4 == 0) r.lse[unit.row * r.lse_row + row_head * r.lse_head] = running[i].lse();
  }
}

}  // namespace sparse

#define SPARSE_MMA(NAME, T, DK, DV, SHARED, TILES)                                             \
  extern "C" __global__ void __launch_bounds__(sparse::Shape<DK, DV, SHARED, TILES>::kThreads) \
      NAME(const __grid_constant__ sparse::Request r) {                                        \
    sparse::attend_mma<T, sparse::Shape<DK, DV, SHARED, TILES>>(r);                            \
  }

#define SPARSE_MMA_NARROW(T)                              \
  SPARSE_MMA(sparse_mma_64_64_1, T, 64, 64, false, 1)     \
  SPARSE_MMA(sparse_mma_64_64_2, T, 64, 64, false, 2)     \
  SPARSE_MMA(sparse_mma_128_128_1, T, 128, 128, false, 1) \
  SPARSE_MMA(sparse_mma_128_128_2, T, 128, 128, false, 2) \
  SPARSE_MMA(sparse_mma_256_256_1, T, 256, 256, false, 1) \
  SPARSE_MMA(sparse_mma_256_256_2, T, 256, 256, false, 2)

#define SPARSE_MMA_WIDE(T)                                \
  SPARSE_MMA(sparse_mma_576_512_1, T, 576, 512, false, 1) \
  SPARSE_MMA(sparse_mma_shared_1, T, 576, 512, true, 1)   \
  SPARSE_MMA(sparse_mma_shared_2, T, 576, 512, true, 2)
