// Attention over positions by multiply-adds: f32 in f32, and half types of any dimension.
//
// 1. A block takes 8 heads and 32 keys at a time. Queries and keys pass through shared memory in
//    slices of 128 numbers; each thread holds the scores of one key for two heads.
// 2. Values are read where they lie: a thread has columns of its own, for all 8 heads.

#pragma once
#include "sparse.cuh"

namespace sparse {

constexpr int kFmaThreads = 128;
constexpr int kFmaHeads = 8;
constexpr int kFmaKeys = 32;
constexpr int kFmaSlice = 128;

// C: columns of a thread.
template <typename T, int C>
__device__ void attend_fma(const Request& r) {
  constexpr int kPitch = kFmaSlice + 4;  // neighbouring keys begin in other banks
  __shared__ __align__(16) float q[kFmaHeads][kFmaSlice];
  __shared__ __align__(16) float k[kFmaKeys][kPitch];
  __shared__ __align__(16) float weights[kFmaKeys][kFmaHeads];
  __shared__ int64_t key_at[kFmaKeys], value_at[kFmaKeys];
  __shared__ float maxima[kFmaHeads], sums[kFmaHeads], scales[kFmaHeads];

  int tid = threadIdx.x;
  int64_t local = r.split ? blockIdx.x / r.segments : blockIdx.x;
  int first = r.split ? blockIdx.x % r.segments : 0;
  int past = r.split ? first + 1 : r.segments;
  Unit unit(r, r.first_unit + local);
  Finder finder(r, unit.row, unit.kv_head);
  const T* queries = static_cast<const T*>(r.q) + unit.row * r.q_row + unit.first_head * r.q_head;
  const T* keys = static_cast<const T*>(r.keys.at) + unit.kv_head * r.keys.head;
  const T* values = static_cast<const T*>(r.values.at) + unit.kv_head * r.values.head + unit.column;
  int columns = min(r.slot_columns, r.value_dim - unit.column);

  Running running[kFmaHeads];
  float run[kFmaHeads][C] = {};
  float sum[kFmaHeads][C];
  // Each warp has two heads: lane by lane the keys.
  int key = tid % kFmaKeys, head = tid / kFmaKeys * 2;
  for (int segment = first; segment < past; segment++) {
    int64_t begin = segment * r.segment;
    int64_t end = min(begin + r.segment, finder.keys);
    if (tid < kFmaHeads) {
      maxima[tid] = minus_infinity();
      sums[tid] = 0.f;
    }
    for (int h = 0; h < kFmaHeads; h++)
      for (int c = 0; c < C; c++) sum[h][c] = 0.f;
    for (int64_t at = begin; at < end; at += kFmaKeys) {
      bool valid = false;
      if (tid < kFmaKeys) {
        int64_t position = finder.position(r, at + tid, finder.entry(r, at + tid));
        int64_t outer = finder.outer(r, position);
        key_at[tid] = Finder::at(r, r.keys, position, outer);
        value_at[tid] = Finder::at(r, r.values, position, outer);
        valid = key_at[tid] >= 0;
      }
      if (!__syncthreads_or(valid)) continue;
      float s0 = 0.f, s1 = 0.f;
      for (int slice = 0; slice < r.key_dim; slice += kFmaSlice) {
        int dims = min(kFmaSlice, r.key_dim - slice);
        for (int i = tid; i < kFmaHeads * kFmaSlice; i += kFmaThreads) {
          int h = i / kFmaSlice, d = i % kFmaSlice;
          bool exists = h < unit.heads && d < dims;
          q[h][d] = exists ? wide(queries[h * r.q_head + slice + d]) : 0.f;
        }
        for (int i = tid; i < kFmaKeys * kFmaSlice; i += kFmaThreads) {
          int n = i / kFmaSlice, d = i % kFmaSlice;
          bool exists = key_at[n] >= 0 && d < dims;
          k[n][d] = exists ? wide(keys[key_at[n] + slice + d]) : 0.f;
        }
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < kFmaSlice; d += 4) {
          float4 x = *reinterpret_cast<const float4*>(&k[key][d]);
          float4 a = *reinterpret_cast<const float4*>(&q[head][d]);
          float4 b = *reinterpret_cast<const float4*>(&q[head + 1][d]);
          s0 = fmaf(a.x, x.x, fmaf(a.y, x.y, fmaf(a.z, x.z, fmaf(a.w, x.w, s0))));
          s1 = fmaf(b.x, x.x, fmaf(b.y, x.y, fmaf(b.z, x.z, fmaf(b.w, x.w, s1))));
        }
        __syncthreads();
      }
      bool seen = key_at[key] >= 0;
      for (int i = 0; i < 2; i++) {
        float s = seen ? (i ? s1 : s0) * r.scale : minus_infinity();
        float most = s;
        for (int lane = 16; lane > 0; lane /= 2) most = greater(most, __shfl_xor_sync(~0u, most, lane));
        float before = maxima[head + i];
        float both = greater(before, most);
        float p = power(s - reference(both));
        float all = p;
        for (int lane = 16; lane > 0; lane /= 2) all += __shfl_xor_sync(~0u, all, lane);
        float scale = power(before - reference(both));
        weights[key][head + i] = p;
        __syncwarp();
        if (key == 0) {
          maxima[head + i] = both;
          scales[head + i] = scale;
          sums[head + i] = fmaf(sums[head + i], scale, all);
        }
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < kFmaHeads; h++)
#pragma unroll
        for (int c = 0; c < C; c++) sum[h][c] *= scales[h];
#pragma unroll 4
      for (int n = 0; n < kFmaKeys; n++) {
        int64_t value = value_at[n];
        if (value < 0) continue;
        float4 a = *reinterpret_cast<const float4*>(&weights[n][0]);
        float4 b = *reinterpret_cast<const float4*>(&weights[n][4]);
#pragma unroll
        for (int c = 0; c < C; c++) {
          int column = tid + c * kFmaThreads;
          float x = column < columns ? wide(values[value + column]) : 0.f;
          sum[0][c] = fmaf(a.x, x, sum[0][c]);
          sum[1][c] = fmaf(a.y, x, sum[1][c]);
          sum[2][c] = fmaf(a.z, x, sum[2][c]);
          sum[3][c] = fmaf(a.w, x, sum[3][c]);
          sum[4][c] = fmaf(b.x, x, sum[4][c]);
          sum[5][c] = fmaf(b.y, x, sum[5][c]);
          sum[6][c] = fmaf(b.z, x, sum[6][c]);
          sum[7][c] = fmaf(b.w, x, sum[7][c]);
        }
      }
      __syncthreads();
    }
    __syncthreads();
    if (r.split) {
      float* part = r.parts + int64_t(blockIdx.x) * slot_floats(r);
#pragma unroll
      for (int h = 0; h < kFmaHeads; h++)
#pragma unroll
        for (int c = 0; c < C; c++) {
          int column = tid + c * kFmaThreads;
          if (column < r.slot_columns) part[h * r.slot_columns + column] = sum[h][c];
        }
      if (tid < kFmaHeads) {
        part += kFmaHeads * r.slot_columns;
        part[tid] = maxima[tid];
        part[kFmaHeads + tid] = sums[tid];
      }
      return;
    }
#pragma unroll
    for (int h = 0; h < kFmaHeads; h++) {
      float own, other;
      if (running[h].merge(maxima[h], sums[h], own, other))
#pragma unroll
        for (int c = 0; c < C; c++) run[h][c] = Running::merged(run[h][c], own, sum[h][c], other);
    }
    __syncthreads();
  }

  T* out = static_cast<T*>(r.out) + unit.row * r.out_row + unit.column;
#pragma unroll
  for (int h = 0; h < kFmaHeads; h++) {
    if (h >= unit.heads) break;
    int row_head = unit.first_head + h;
    float sink = r.sink ? r.sink[row_head * r.sink_stride] : 0.f;
    float share = running[h].share(r.sink != nullptr, sink);
#pragma unroll
    for (int c = 0; c < C; c++) {
      int column = tid + c * kFmaThreads;
      if (column < columns) out[row_head * r.out_head + column] = narrow<T>(running[h].finished(run[h][c], share));
    }
    if (tid == 0 && unit.column == 0) r.lse[unit.row * r.lse_row + row_head * r.lse_head] = running[h].lse();
  }
}

}  // namespace sparse

#define SPARSE_FMA(T)                                                                                         \
  extern "C" __global__ void __launch_bounds__(sparse::kFmaThreads)                                           \
      sparse_fma_1(const __grid_constant__ sparse::Request r) {                                               \
    sparse::attend_fma<T, 1>(r);                                                                              \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(sparse::kFmaThreads)                                           \
      sparse_fma_4(const __grid_constant__ sparse::Request r) {                                               \
    sparse::attend_fma<T, 4>(r);                                                                              \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(128) sparse_merge(const __grid_constant__ sparse::Request r) { \
    sparse::merge<T>(r);                                                                                      \
  }
