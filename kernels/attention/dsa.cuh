// What a layer does to its rows between the products: norms, RoPE, and new keys into the cache.
//
// 1. `keys`: of the product of the hidden states with the weights of queries, latent and index key, side by
//    side. Three blocks a row: RMS norm of the queries' latent; RMS norm of the keys' latent and RoPE of the
//    part behind it, both into the cache; layer norm and RoPE of the index key, into the cache.
// 2. `queries`: of the product of the queries' latent with the weights of both kinds of queries. A warp a head: RoPE
//    into the tail of an attention query, whose first part another product writes; RoPE of an index query.
// 3. `weights`: the indexer's weight of each head, in f32, of few rows: a block a head and four rows.
//
// All arithmetic is f32. What a model's own code rounds between two steps is rounded here too, but for what comes of
// the Hadamard transform, which stays f32 until it is e4m3. Index keys and queries become e4m3 where the cache
// is: they go through a Hadamard transform, which spreads outliers and leaves products as they are, and get a scale
// of the greatest number.
//
// A row's position is one less than its end; a row whose end is 0 has no place, and nothing of it enters the
// cache. Every sum is in one order, so a row does not depend on the others.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cstdint>

namespace dsa {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T narrowed(float x);
template <>
__device__ __forceinline__ float narrowed(float x) { return x; }
template <>
__device__ __forceinline__ __half narrowed(float x) { return __float2half(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 narrowed(float x) { return __float2bfloat16(x); }

template <class T>
__device__ __forceinline__ float rounded(float x) { return widen(narrowed<T>(x)); }

// Which rows there are, and where RoPE finds its numbers. `Rows` in src/attention/cuda/dsa/device.rs.
struct Rows {
  const uint32_t* ends;
  const uint32_t* sequences;  // of each row, or null
  const float *cos, *sin;     // of a position, rotated / 2 each
  int64_t first;              // the sequence that the rows' first is
  int64_t each;               // rows of a sequence, where nothing says whose a row is
  int32_t rotated;
  float eps;

  __device__ __forceinline__ int64_t sequence(int64_t row) const {
    return first + (sequences ? int64_t(sequences[row]) : row / each);
  }
  // Of a row without a place, that of the first position.
  __device__ __forceinline__ int64_t table(uint32_t end) const { return int64_t(end ? end - 1 : 0) * (rotated / 2); }
};

// Pair i of a vector's rotated numbers: where its two lie.
__device__ __forceinline__ void pair_of(bool interleaved, int pairs, int i, int& a, int& b) {
  a = interleaved ? 2 * i : i;
  b = interleaved ? 2 * i + 1 : i + pairs;
}

// Over a warp, or a block of kThreads. All threads call, all get the result.
template <class Op>
__device__ __forceinline__ float over_warp(float x, Op op) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = op(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}
__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float parts[kWarps];
  x = over_warp(x, add);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += parts[i];
  return sum;
}

// The threads that share a vector in shared memory.
struct OfBlock {
  static constexpr int kCount = kThreads;
  __device__ static __forceinline__ int own() { return threadIdx.x; }
  __device__ static __forceinline__ void meet() { __syncthreads(); }
  template <class Op>
  __device__ static __forceinline__ float all(float x, Op op) {
    __shared__ float parts[kWarps];
    x = over_warp(x, op);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) x = op(x, parts[i]);
    return x;
  }
};
struct OfWarp {
  static constexpr int kCount = 32;
  __device__ static __forceinline__ int own() { return threadIdx.x % 32; }
  __device__ static __forceinline__ void meet() { __syncwarp(); }
  template <class Op>
  __device__ static __forceinline__ float all(float x, Op op) {
    return over_warp(x, op);
  }
};

// RoPE of a vector in shared memory, rounded.
template <class T, class Threads>
__device__ __forceinline__ void rotate(const Rows& rows, float* vector, int64_t table, bool interleaved) {
  const int pairs = rows.rotated / 2;
  for (int i = Threads::own(); i < pairs; i += Threads::kCount) {
    int a, b;
    pair_of(interleaved, pairs, i, a, b);
    const float c = rows.cos[table + i], s = rows.sin[table + i], x = vector[a], y = vector[b];
    vector[a] = rounded<T>(x * c - y * s);
    vector[b] = rounded<T>(x * s + y * c);
  }
  Threads::meet();
}

// How vectors become e4m3. `Fp8` in src/attention/cuda/dsa/device.rs.
struct Fp8 {
  int32_t hadamard, power_of_two;
};

// A vector in shared memory as e4m3, and its scale. (`act_quant` of DeepSeek-V3.2, of which a vector is one block.)
template <class Threads>
__device__ __forceinline__ float quantize(Fp8 how, float* vector, int dim, __nv_fp8_storage_t* to) {
  if (how.hadamard) {
    for (int apart = 1; apart < dim; apart *= 2) {
      for (int i = Threads::own(); i < dim / 2; i += Threads::kCount) {
        const int a = i / apart * 2 * apart + i % apart, b = a + apart;
        const float x = vector[a], y = vector[b];
        vector[a] = x + y;
        vector[b] = x - y;
      }
      Threads::meet();
    }
  }
  const float orthonormal = how.hadamard ? rsqrtf(float(dim)) : 1.f;
  float most = 0;
  for (int i = Threads::own(); i < dim; i += Threads::kCount) most = fmaxf(most, fabsf(vector[i] * orthonormal));
  most = fmaxf(Threads::all(most, [](float a, float b) { return fmaxf(a, b); }), 1e-4f);
  float scale = most / 448.f;
  if (how.power_of_two) {
    // The least that is not below it.
    const uint32_t bits = __float_as_uint(scale);
    scale = __uint_as_float((bits & 0x7fffff ? bits + 0x800000 : bits) & 0x7f800000);
  }
  for (int i = Threads::own(); i < dim; i += Threads::kCount)
    to[i] = __nv_cvt_float_to_fp8(vector[i] * orthonormal / scale, __NV_SATFINITE, __NV_E4M3);
  return scale;
}

// `KeysRequest` in src/attention/cuda/dsa/device.rs.
template <class T>
struct KeysRequest {
  Rows rows;
  const T* products;  // of a row: queries' latent, keys' latent, what is rotated behind it, index key
  int64_t pitch;
  const T *query_gain, *latent_gain;
  const float *key_gain, *key_shift;
  T* query_latent;  // [rows, rank]
  T* cache;
  int64_t cache_outer, cache_token;
  void* index_keys;  // T, or e4m3 where there are scales; null where there is no indexer
  int64_t keys_outer, keys_token;
  float* scales;
  int64_t scales_outer, scales_token;
  int32_t rank, latent, dim, interleaved;
  Fp8 fp8;
};
static_assert(sizeof(Rows) == 56 && sizeof(KeysRequest<float>) == 56 + 128 + 24, "the host gives as much");

// RMS norm of n numbers.
template <class T>
__device__ __forceinline__ void rms_norm(const T* from, const T* gain, int n, float eps, T* to) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const float x = widen(from[i]);
    sum += x * x;
  }
  const float factor = rsqrtf(block_sum(sum) / n + eps);
  for (int i = threadIdx.x; i < n; i += kThreads) to[i] = narrowed<T>(factor * widen(from[i]) * widen(gain[i]));
}

template <class T>
__device__ __forceinline__ void keys(const KeysRequest<T>& r) {
  extern __shared__ float vector[];
  const int parts = r.index_keys ? 3 : 2;
  const int64_t row = blockIdx.x / parts;
  const int part = blockIdx.x % parts;
  const uint32_t end = r.rows.ends[row];
  const int64_t sequence = r.rows.sequence(row), place = int64_t(end) - 1, table = r.rows.table(end);
  const T* from = r.products + row * r.pitch;
  if (part == 0) {
    rms_norm(from, r.query_gain, r.rank, r.rows.eps, r.query_latent + row * r.rank);
    return;
  }
  // Nobody reads the keys of a row without a place.
  if (end == 0) return;
  from += r.rank;
  if (part == 1) {
    T* const to = r.cache + sequence * r.cache_outer + place * r.cache_token;
    rms_norm(from, r.latent_gain, r.latent, r.rows.eps, to);
    const int pairs = r.rows.rotated / 2;
    for (int i = threadIdx.x; i < pairs; i += kThreads) {
      const float c = r.rows.cos[table + i], s = r.rows.sin[table + i];
      const float x = widen(from[r.latent + 2 * i]), y = widen(from[r.latent + 2 * i + 1]);
      to[r.latent + 2 * i] = narrowed<T>(x * c - y * s);
      to[r.latent + 2 * i + 1] = narrowed<T>(x * s + y * c);
    }
    return;
  }
  from += r.latent + r.rows.rotated;
  float sum = 0;
  for (int i = threadIdx.x; i < r.dim; i += kThreads) sum += widen(from[i]);
  const float mean = block_sum(sum) / r.dim;
  sum = 0;
  for (int i = threadIdx.x; i < r.dim; i += kThreads) {
    const float x = widen(from[i]) - mean;
    sum += x * x;
  }
  const float factor = rsqrtf(block_sum(sum) / r.dim + r.rows.eps);
  for (int i = threadIdx.x; i < r.dim; i += kThreads)
    vector[i] = rounded<T>((widen(from[i]) - mean) * factor * r.key_gain[i] + r.key_shift[i]);
  __syncthreads();
  rotate<T, OfBlock>(r.rows, vector, table, r.interleaved);
  const int64_t to = sequence * r.keys_outer + place * r.keys_token;
  if (r.scales != nullptr) {
    const float scale =
        quantize<OfBlock>(r.fp8, vector, r.dim, static_cast<__nv_fp8_storage_t*>(r.index_keys) + to);
    if (threadIdx.x == 0) r.scales[sequence * r.scales_outer + place * r.scales_token] = scale;
    return;
  }
  for (int i = threadIdx.x; i < r.dim; i += kThreads)
    static_cast<T*>(r.index_keys)[to + i] = narrowed<T>(vector[i]);
}

// `QueriesRequest` in src/attention/cuda/dsa/device.rs.
template <class T>
struct QueriesRequest {
  Rows rows;
  const T* products;  // of a row: for each head nope numbers and the rotated ones, then the index queries
  int64_t pitch;
  T* queries;           // [rows, heads, latent + rotated], of which the last are written
  void* index_queries;  // [rows, index_heads, dim], T, or e4m3 where there are weights
  float* weights;       // [rows, index_heads], to be multiplied by the scales; or null
  int64_t count;        // rows
  int32_t heads, nope, latent, index_heads, dim, interleaved;
  Fp8 fp8;
};
static_assert(sizeof(QueriesRequest<float>) == 56 + 48 + 32, "the host gives as much");

template <class T>
__device__ __forceinline__ void queries(const QueriesRequest<T>& r) {
  extern __shared__ float vectors[];
  float* const vector = vectors + threadIdx.x / 32 * r.dim;
  const int lane = threadIdx.x % 32, each = r.heads + r.index_heads;
  const int64_t number = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t row = number / each;
  const int head = int(number % each);
  if (row >= r.count) return;
  const int64_t table = r.rows.table(r.rows.ends[row]);
  const int rotated = r.rows.rotated;
  const T* from = r.products + row * r.pitch;
  if (head < r.heads) {
    from += int64_t(head) * (r.nope + rotated) + r.nope;
    T* const to = r.queries + (row * r.heads + head) * (r.latent + rotated) + r.latent;
    for (int i = lane; i < rotated / 2; i += 32) {
      const float c = r.rows.cos[table + i], s = r.rows.sin[table + i];
      const float x = widen(from[2 * i]), y = widen(from[2 * i + 1]);
      to[2 * i] = narrowed<T>(x * c - y * s);
      to[2 * i + 1] = narrowed<T>(x * s + y * c);
    }
    return;
  }
  const int64_t index = row * r.index_heads + (head - r.heads);
  from += int64_t(r.heads) * (r.nope + rotated) + int64_t(head - r.heads) * r.dim;
  for (int i = lane; i < r.dim; i += 32) vector[i] = widen(from[i]);
  __syncwarp();
  rotate<T, OfWarp>(r.rows, vector, table, r.interleaved);
  if (r.weights != nullptr) {
    auto* to = static_cast<__nv_fp8_storage_t*>(r.index_queries) + index * r.dim;
    const float scale = quantize<OfWarp>(r.fp8, vector, r.dim, to);
    // A scale is positive, and goes through ReLU into the weight.
    if (lane == 0) r.weights[index] *= scale;
    return;
  }
  for (int i = lane; i < r.dim; i += 32)
    static_cast<T*>(r.index_queries)[index * r.dim + i] = narrowed<T>(vector[i]);
}

// Rows that read a head's weights together.
constexpr int kTogether = 4;

// A block a head and so many rows: `x` [rows, n] by the head's weights, to [rows, heads].
template <class T>
__device__ __forceinline__ void weights(const T* x, int64_t pitch, const float* matrix, int rows, int n, int heads,
                                        float* to) {
  const int head = blockIdx.x % heads, first = blockIdx.x / heads * kTogether;
  const float* own = matrix + int64_t(head) * n;
  float sums[kTogether] = {};
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const float weight = own[i];
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      if (first + j < rows) sums[j] += weight * widen(x[(first + j) * pitch + i]);
  }
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
    const float sum = block_sum(sums[j]);
    if (threadIdx.x == 0 && first + j < rows) to[int64_t(first + j) * heads + head] = sum;
  }
}

// Adds a bias to each row, where it lies.
template <class T>
__device__ __forceinline__ void add_bias(T* x, const T* bias, uint64_t count, uint32_t n) {
  const uint64_t step = uint64_t(gridDim.x) * kThreads;
  for (uint64_t i = uint64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step)
    x[i] = narrowed<T>(widen(x[i]) + widen(bias[i % n]));
}

}  // namespace dsa

#define DSA(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(dsa::kThreads)                                              \
      dsa_keys(const __grid_constant__ dsa::KeysRequest<T> r) {                                            \
    dsa::keys(r);                                                                                          \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(dsa::kThreads)                                              \
      dsa_queries(const __grid_constant__ dsa::QueriesRequest<T> r) {                                      \
    dsa::queries(r);                                                                                       \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(dsa::kThreads)                                              \
      dsa_weights(const T* x, int64_t pitch, const float* matrix, int32_t rows, int32_t n, int32_t heads,  \
                  float* to) {                                                                             \
    dsa::weights(x, pitch, matrix, rows, n, heads, to);                                                    \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(dsa::kThreads)                                              \
      dsa_bias(T* x, const T* bias, uint64_t count, uint32_t n) {                                          \
    dsa::add_bias(x, bias, count, n);                                                                      \
  }
