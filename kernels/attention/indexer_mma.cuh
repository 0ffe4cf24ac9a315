// The scores on any device: products by mma.sync, or by fused multiply-add where they are f32. Four
// warps, of which each has 16 of a unit's keys. Units are fetched ahead; an item's queries once.
#pragma once
#include "indexer.cuh"

namespace mma {

constexpr int kThreads = 128;
constexpr int kColumns = 128;

// What queries are held as: e4m3 as f16, since they are multiplied with every key.
template <class T>
using Held = std::conditional_t<std::is_same_v<T, fp8>, __half, T>;

// Units on chip at a time. Of f32 there is no room for a second on every device.
template <class T>
constexpr int kStages = std::is_same_v<T, float> ? 1 : 3;

struct Notes {
  UnitNotes units[3];
  alignas(16) float weights[kColumns];
  uint32_t lower[kColumns / 16], upper[kColumns / 16];
};

// e4m3 in the order in which widen_fp8 leaves keys: of every 16 elements, lane % 4 has number
// 4 (lane % 4) + {0, 1} where the product expects 2 (lane % 4) + {0, 1}, and the next two 8 further on.
__device__ __forceinline__ int widened_place(int element) {
  return element / 16 * 16 + element % 4 / 2 * 8 + element % 16 / 4 * 2 + element % 2;
}

// Queries in e4m3, as f16.
template <int kHeads>
__device__ void widen_queries(const Request& r, char* to, int32_t first, int32_t count) {
  const int width = (r.bytes + 31) / 32 * 32;
  for (int i = threadIdx.x; i < kColumns * width / 4; i += kThreads) {
    const int column = i / (width / 4), element = i % (width / 4) * 4;
    const int query = column / kHeads, head = column % kHeads;
    uint32_t four = 0;
    if (query < count && head < r.heads) {
      const char* from = r.queries + (first + query) * r.query_row + head * r.query_head + element;
      for (int j = 0; j < 4; ++j)
        if (element + j < r.bytes) four |= uint32_t(uint8_t(from[j])) << 8 * j;
    }
    uint32_t pairs[2];
    widen_fp8(four, pairs[0], pairs[1]);
    for (int j = 0; j < 2; ++j) {
      const int place = widened_place(element + 2 * j);
      *reinterpret_cast<uint32_t*>(to + swizzled<kColumns>(column, place / 8) + place % 8 * 2) = pairs[j];
    }
  }
}

// Products of a warp's 16 keys with all columns.
template <class T>
__device__ __forceinline__ void multiply(const Request& r, uint32_t keys, uint32_t queries, float (&products)[64]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto& by_column = reinterpret_cast<float(&)[16][4]>(products);
#pragma unroll
  for (int i = 0; i < 64; ++i) products[i] = 0;
  const int steps = vectors_of(r.bytes) / 2;
  if constexpr (std::is_same_v<T, float>) {
    for (int v = 0; v < steps * 2; ++v) {
      const int row = warp * 16 + lane / 4;
      const float4 a = get_16(keys + swizzled<kUnit>(row, v)), b = get_16(keys + swizzled<kUnit>(row + 8, v));
#pragma unroll
      for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 q = get_16(queries + swizzled<kColumns>(j * 8 + lane % 4 * 2 + i, v));
          float& low = by_column[j][i];
          float& high = by_column[j][i + 2];
          low = fmaf(a.w, q.w, fmaf(a.z, q.z, fmaf(a.y, q.y, fmaf(a.x, q.x, low))));
          high = fmaf(b.w, q.w, fmaf(b.z, q.z, fmaf(b.y, q.y, fmaf(b.x, q.x, high))));
        }
      }
    }
  } else {
    // Of a step of 32 bytes, matrices 0 and 1 are the first 16 bytes of keys 0 to 7 and 8 to 15.
    for (int step = 0; step < steps; ++step) {
      uint32_t a[4];
      load_matrices(a, keys + swizzled<kUnit>(warp * 16 + lane % 16, step * 2 + lane / 16));
      const auto columns = [&](const uint32_t (&a)[4], int step) {
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
          uint32_t b[4];
          const int column = j * 8 + lane / 16 * 8 + lane % 8;
          load_matrices(b, queries + swizzled<kColumns>(column, step * 2 + lane / 8 % 2));
          multiply_16x8<Held<T>>(by_column[j], a, b[0], b[1]);
          multiply_16x8<Held<T>>(by_column[j + 1], a, b[2], b[3]);
        }
      };
      if constexpr (std::is_same_v<T, fp8>) {
        uint32_t low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) widen_fp8(a[i], low[i], high[i]);
        columns({low[0], low[1], high[0], high[1]}, step * 2);
        columns({low[2], low[3], high[2], high[3]}, step * 2 + 1);
      } else {
        columns(a, step);
      }
    }
  }
}

// Bytes of a block of `rows` rows of so many bytes each.
__device__ __forceinline__ uint32_t block_bytes(int rows, int bytes) { return (bytes + 127) / 128 * 128 * rows; }

template <class T, int kHeads>
__device__ __forceinline__ void scores(const Request& r) {
  constexpr int kQueries = kColumns / kHeads;
  extern __shared__ __align__(1024) char shared[];
  __shared__ Notes notes;
  const int held_bytes = r.bytes * int(sizeof(Held<T>) / sizeof(T));
  const uint32_t queries = shared_address(shared);
  const uint32_t keys = queries + block_bytes(kColumns, held_bytes), stage_bytes = block_bytes(kUnit, r.bytes);
  const int warp = threadIdx.x / 32;

  const Share share = find_share<kQueries, kThreads>(r);
  for_each_stretch<kQueries>(r, share, [&](const Item& item, uint32_t position, uint32_t units) {
    __syncthreads();  // The item before is done with.
    if constexpr (std::is_same_v<T, fp8>)
      widen_queries<kHeads>(r, shared, item.first, item.count);
    else
      fetch_queries<T, kColumns, kHeads, kThreads, 0>(r, threadIdx.x, queries, item.first, item.count);
    fetch_weights<kColumns, kHeads, kThreads>(r, threadIdx.x, shared_address(notes.weights), item.first, item.count);
    if (threadIdx.x < kQueries) {
      uint32_t lower = 0, upper = 0;
      if (threadIdx.x < item.count)
        clamped_bounds(r.starts, r.ends, item.first + threadIdx.x, r.length, lower, upper);
      notes.lower[threadIdx.x] = lower;
      notes.upper[threadIdx.x] = upper;
    }
    const auto fetch = [&](uint32_t unit) {
      const uint32_t stage = unit % kStages<T>;
      if (unit < units)
        fetch_keys<T, kThreads, 0>(r, threadIdx.x, keys + stage * stage_bytes, notes.units[stage], item,
                                   position + unit * kUnit);
      copies_commit();
    };
    if constexpr (kStages<T> > 1)
      for (int unit = 0; unit < kStages<T> - 1; ++unit) fetch(unit);
    for (uint32_t unit = 0; unit < units; ++unit) {
      if constexpr (kStages<T> > 1) {
        copies_wait<kStages<T> - 2>();
        __syncthreads();
        fetch(unit + kStages<T> - 1);  // over the unit before this one
      } else {
        __syncthreads();
        fetch(unit);
        copies_wait<0>();
        __syncthreads();
      }
      const uint32_t stage = unit % kStages<T>;
      float products[64];
      multiply<T>(r, keys + stage * stage_bytes, queries, products);
      const Beside<kColumns, kHeads> beside(r, shared_address(notes.weights), notes.units[stage], notes.lower,
                                            notes.upper, warp * 16);
      reduce<kColumns, kHeads>(r, products, beside, item.first, position + unit * kUnit + warp * 16);
    }
  });
  copies_wait<0>();
}

}  // namespace mma

#define INDEXER_MMA(T, heads)                                                                                \
  extern "C" __global__ void __launch_bounds__(mma::kThreads, 2)                                         \
      indexer_##heads(const __grid_constant__ Request r) {                                                   \
    mma::scores<T, heads>(r);                                                                                \
  }

#define INDEXER_MMA_ALL(T) \
  INDEXER_MMA(T, 16)       \
  INDEXER_MMA(T, 32)       \
  INDEXER_MMA(T, 64)       \
  INDEXER_MMA(T, 128)
