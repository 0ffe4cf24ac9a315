// Scores of the lightning indexer: score[s, t] = scale[t] x sum over h of w[s, h] x ReLU(q[s, h] . k[t]).
//
// 1. Keys are the rows of a matrix product and the heads of one or more queries its columns. A thread
//    then holds, of two keys, every fourth pair of heads: ReLU, weights and most of the sum over heads
//    are two instructions an element, on registers, and four lanes meet by two shuffles. No product of a
//    single head is ever written.
// 2. An *item* is a few rows of queries of one sequence, whose columns stay in shared memory. Past them
//    goes the stretch of keys that any of the rows sees, in *units* of 64.
// 3. All units of all items, one item behind the other, are dealt to the blocks in equal stretches, which
//    each block finds from the bounds on the device. So decoding of one long sequence, of many short ones
//    and causal prefill all fill the device to the last unit, and nothing is launched by data.
// 4. Keys are read where they lie: packed, in a cache, in pages; a key that no row of the item sees is
//    not read at all, and its row of the product is 0. What one row of an item sees and another doesn't
//    is not stored for the other.
//
// Deterministic: a score is summed in one order, which depends on the number of heads and the dimension
// alone: not on the columns that the query was given, the item, the unit, or the form of the cache.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

#include "../common/pipeline.cuh"
#include "../common/products.cuh"
#include "ints.cuh"

// Keys of a unit.
constexpr int kUnit = 64;

// `Request` in src/attention/cuda/indexer.rs.
struct Request {
  const char* queries;
  const char* keys;
  const float* scales;  // or null
  const float* weights;
  float* scores;
  int64_t query_row, query_head;   // in bytes
  int64_t key_outer, key_token;    // in bytes; outer is a sequence or a page
  int64_t scale_outer, scale_token;
  int64_t weight_row, weight_head;
  int64_t pitch;
  Ints starts, ends, row_sequences, table;
  int64_t sequences, pages;
  uint32_t length, page;  // page is 0 where there is no table
  int32_t page_shift;     // of a page that is a power of two, or -1
  int32_t rows, rows_each, items, items_each;
  int32_t heads, bytes;  // bytes of one head or key
  int32_t query_vectors, key_vectors;  // whether their rows can be read 16 bytes at a time
  // Keys of a tile, of which a unit has one or more and a page too; 0 where there are no tensor maps.
  int32_t tile;
  // Units begin at multiples of so many keys: of a tile in pages, and always of 8, so that what lanes
  // store together is a whole sector.
  uint32_t alignment;
  int32_t scale_tiles;  // whether scales come by tiles too
  int32_t unused;
};
static_assert(sizeof(Request) == 320 && sizeof(Ints) == 32, "the host gives as much");

// Rows of queries [first, first + count), all of one sequence, and the keys that any of them sees.
struct Item {
  int32_t first, count;
  int64_t sequence;
  uint32_t begin, end;
  uint32_t alignment;

  // Where its first unit begins.
  __device__ __forceinline__ uint32_t origin() const { return begin & ~(alignment - 1); }
  __device__ __forceinline__ uint32_t units() const {
    return begin < end ? (end - origin() - 1) / kUnit + 1 : 0;
  }
};

// Item i of up to kRows rows. Where a map names the sequence of each row, rows are the items: the first
// row of each run of one sequence stands for all of it, within aligned groups of kRows, and the others are
// empty.
template <int kRows>
__device__ __forceinline__ Item describe(const Request& r, int32_t i) {
  Item item = {0, 0, 0, 0, 0, r.alignment};
  if (i >= r.items) return item;
  if (r.row_sequences.present()) {
    item.first = i;
    item.sequence = r.row_sequences.get(i);
    if (item.sequence < 0 || item.sequence >= r.sequences) return item;
    if (i % kRows && r.row_sequences.get(i - 1) == item.sequence) return item;
    do ++item.count;
    while ((i + item.count) % kRows && i + item.count < r.rows &&
           r.row_sequences.get(i + item.count) == item.sequence);
  } else {
    item.sequence = i / r.items_each;
    const int32_t within = i % r.items_each * kRows;
    item.first = int32_t(item.sequence) * r.rows_each + within;
    item.count = max(0, min(min(kRows, r.rows_each - within), r.rows - item.first));
  }
  item.begin = ~0u;
  for (int32_t row = item.first; row < item.first + item.count; ++row) {
    uint32_t begin, end;
    clamped_bounds(r.starts, r.ends, row, r.length, begin, end);
    if (begin == end) continue;
    item.begin = min(item.begin, begin);
    item.end = max(item.end, end);
  }
  if (item.begin == ~0u) item.begin = 0;
  return item;
}

// A block's stretch of the units: it begins so many units into an item.
struct Share {
  int32_t item;
  uint32_t skipped;
  unsigned long long units;
};

// By all threads of a block.
template <int kRows, int kThreads>
__device__ __forceinline__ Share find_share(const Request& r) {
  constexpr int kWarps = kThreads / 32;
  __shared__ unsigned long long sums[kWarps];
  __shared__ Share share;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t each = (int64_t(r.items) + kThreads - 1) / kThreads;
  const int32_t first = int32_t(min(each * threadIdx.x, int64_t(r.items)));
  const int32_t past = int32_t(min(each * (threadIdx.x + 1), int64_t(r.items)));
  unsigned long long own = 0;
  for (int32_t i = first; i < past; ++i) own += describe<kRows>(r, i).units();
  unsigned long long through = own;
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, through, distance);
    if (lane >= distance) through += other;
  }
  if (lane == 31) sums[warp] = through;
  if (threadIdx.x == 0) share.units = 0;
  __syncthreads();
  unsigned long long before = through - own, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += sums[w];
    all += sums[w];
  }
  const unsigned long long lower = all * blockIdx.x / gridDim.x, upper = all * (blockIdx.x + 1) / gridDim.x;
  if (lower < upper && lower >= before && lower < before + own) {
    int32_t i = first;
    uint32_t units = describe<kRows>(r, i).units();
    while (lower >= before + units) {
      before += units;
      units = describe<kRows>(r, ++i).units();
    }
    share = {i, uint32_t(lower - before), upper - lower};
  }
  __syncthreads();
  return share;
}

// Calls `use` with each stretch of a block's share, in order: the item, the first key, the units. All
// threads of a warp together; all warps go the same way.
template <int kRows, class Use>
__device__ __forceinline__ void for_each_stretch(const Request& r, const Share& share, Use use) {
  const int lane = threadIdx.x % 32;
  unsigned long long left = share.units;
  uint32_t skipped = share.skipped;
  // 32 at a time: empty items, such as the rows of padding, cost next to nothing.
  for (int32_t i = share.item; left; i += 32) {
    const Item own = describe<kRows>(r, i + lane);
    unsigned filled = __ballot_sync(~0u, own.units() > 0);
    for (; filled && left; filled &= filled - 1) {
      const int from = __ffs(filled) - 1;
      Item item;
      item.first = __shfl_sync(~0u, own.first, from);
      item.count = __shfl_sync(~0u, own.count, from);
      item.sequence = __shfl_sync(~0u, own.sequence, from);
      item.begin = __shfl_sync(~0u, own.begin, from);
      item.end = __shfl_sync(~0u, own.end, from);
      item.alignment = r.alignment;
      const uint32_t units = uint32_t(min(left, (unsigned long long)(item.units() - skipped)));
      use(item, item.origin() + skipped * kUnit, units);
      left -= units;
      skipped = 0;
    }
  }
}

// The place of a key; false where the table names no page.
__device__ __forceinline__ bool locate(const Request& r, int64_t sequence, uint32_t position, int64_t& outer,
                                       uint32_t& token) {
  outer = sequence;
  token = position;
  if (r.page == 0) return true;
  uint32_t block;
  if (r.page_shift >= 0) {
    block = position >> r.page_shift;
    token = position & (r.page - 1);
  } else {
    block = position / r.page;
    token = position % r.page;
  }
  outer = r.table.get(sequence, block);
  return outer >= 0 && outer < r.pages;
}

// The vector of 16 bytes of which `bytes` are read, element by element, and the others 0.
template <class T>
__device__ __forceinline__ uint4 gather_16(const char* from, uint32_t bytes) {
  union {
    T elements[16 / sizeof(T)];
    uint4 vector;
  } v;
  v.vector = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < int(16 / sizeof(T)); ++i)
    if (i * sizeof(T) < bytes) v.elements[i] = reinterpret_cast<const T*>(from)[i];
  return v.vector;
}

// Where vector `v` of row `row` lies, in blocks of kRows rows of 128 bytes.
template <int kRows>
__device__ __forceinline__ uint32_t swizzled(int row, int v) {
  return (v / 8) * (kRows * 128) + row * 128 + ((v % 8) ^ (row % 8)) * 16;
}

// Has kThreads threads copy one vector each, or gather it where addresses are not multiples of 16.
template <class T>
__device__ __forceinline__ void fetch_16(uint32_t to, const char* from, uint32_t bytes, bool vectors) {
  if (vectors)
    copy_16(to, from, bytes);
  else
    put_16(to, gather_16<T>(from, bytes));
}

// Vectors of a row in shared memory: whole steps of 32 bytes. Zeros fill what a row has less.
__device__ __forceinline__ int vectors_of(int bytes) { return (bytes + 31) / 32 * 2; }

// Bytes of vector v that a row of so many bytes has.
__device__ __forceinline__ uint32_t filled(int bytes, int v) { return uint32_t(min(max(bytes - 16 * v, 0), 16)); }

// The columns: kColumns / kHeads rows of queries from `first` on, of which `count` are there, each of
// kHeads heads, of which r.heads are. kVectors is the vectors of a row, or 0 where only `bytes` tells.
template <class T, int kColumns, int kHeads, int kThreads, int kVectors>
__device__ __forceinline__ void fetch_queries(const Request& r, int thread, uint32_t to, int32_t first, int32_t count) {
  const int vectors = kVectors ? kVectors : vectors_of(r.bytes);
  for (int i = thread; i < kColumns * vectors; i += kThreads) {
    const int column = i / vectors, v = i % vectors;
    const int query = column / kHeads, head = column % kHeads;
    const bool there = query < count && head < r.heads;
    const uint32_t bytes = there ? filled(r.bytes, v) : 0;
    const char* from = r.queries;
    if (bytes) from += (first + query) * r.query_row + head * r.query_head + 16 * v;
    fetch_16<T>(to + swizzled<kColumns>(column, v), from, bytes, r.query_vectors);
  }
}

// Where the weight of a head lies, so that a thread reads those of its heads in vectors of four: lane % 4
// has heads 2 (lane % 4) + {0, 1, 8, 9} of every 16.
__device__ __forceinline__ int weight_place(int head) {
  return head / 16 * 16 + head % 8 / 2 * 4 + head % 16 / 8 * 2 + head % 2;
}

template <int kColumns, int kHeads, int kThreads>
__device__ __forceinline__ void fetch_weights(const Request& r, int thread, uint32_t to, int32_t first, int32_t count) {
  for (int column = thread; column < kColumns; column += kThreads) {
    const int query = column / kHeads, head = column % kHeads;
    const bool there = query < count && head < r.heads;
    const float* from = r.weights;
    if (there) from += (first + query) * r.weight_row + head * r.weight_head;
    copy_4(to + (query * kHeads + weight_place(head)) * 4, from, there ? 4 : 0);
  }
}

// What belongs to the keys of a unit beside them.
struct alignas(128) UnitNotes {
  float scales[kUnit];
  uint32_t present[2];  // a bit a key: whether it has a page
};

// A unit: keys from `position` on, of which the item sees [begin, end). By kThreads threads, whole warps.
// The bits of its notes are stored by lane 0 of two of the warps, everything else is fetched.
template <class T, int kThreads, int kVectors>
__device__ __forceinline__ void fetch_keys(const Request& r, int thread, uint32_t to, UnitNotes& notes,
                                           const Item& item, uint32_t position) {
  const auto find = [&](int row, int64_t& outer, uint32_t& token) {
    // Beyond the item's end positions could wrap.
    if (uint32_t(row) >= item.end - position || position + row < item.begin) return 2;
    return int(locate(r, item.sequence, position + row, outer, token));
  };
  if constexpr (kVectors != 0) {
    constexpr int kEach = kUnit * kVectors / kThreads;  // vectors of a thread
    constexpr int kApart = kThreads / kVectors;         // their rows
    const int v = thread % kVectors;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = thread / kVectors + i * kApart;
      int64_t outer;
      uint32_t token;
      const bool there = find(row, outer, token) == 1;
      const char* from = r.keys;
      if (there) from += outer * r.key_outer + token * r.key_token + 16 * v;
      fetch_16<T>(to + swizzled<kUnit>(row, v), from, there ? 16 : 0, r.key_vectors);
    }
  } else {
    const int vectors = vectors_of(r.bytes);
    for (int i = thread; i < kUnit * vectors; i += kThreads) {
      const int row = i / vectors, v = i % vectors;
      int64_t outer;
      uint32_t token;
      const bool there = find(row, outer, token) == 1;
      const uint32_t bytes = there ? filled(r.bytes, v) : 0;
      const char* from = r.keys;
      if (bytes) from += outer * r.key_outer + token * r.key_token + 16 * v;
      fetch_16<T>(to + swizzled<kUnit>(row, v), from, bytes, r.key_vectors);
    }
  }
  if (thread < kUnit && (r.scales != nullptr || r.page != 0)) {
    int64_t outer;
    uint32_t token;
    const int found = find(thread, outer, token);
    const unsigned present = __ballot_sync(~0u, found != 0);
    if (thread % 32 == 0) notes.present[thread / 32] = present;
    if (r.scales != nullptr) {
      const float* from = r.scales;
      if (found == 1) from += outer * r.scale_outer + token * r.scale_token;
      copy_4(shared_address(&notes.scales[thread]), from, found == 1 ? 4 : 0);
    }
  }
}

// NaN stays NaN.
__device__ __forceinline__ float relu(float x) {
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

// What a thread needs beside the products of a warp's 16 keys with kColumns columns to make scores of
// them, read while they are under way: the weights of its heads, and of the score or scores that it will
// store the key, its scale and the bounds of the query.
template <int kColumns, int kHeads>
struct Beside {
  static constexpr int kQueries = kColumns / kHeads;
  static constexpr int kStored = kQueries > 1 ? kQueries / 2 : 1;
  float4 weights[kColumns / 16];
  uint32_t lower[kStored], upper[kStored];
  float scale;
  bool present;

  // Lanes of four that differ in bit 0 store different keys, and in bit 1 different queries.
  static __device__ __forceinline__ int key() { return threadIdx.x % 32 / 4 + (threadIdx.x & 1 ? 8 : 0); }
  static __device__ __forceinline__ int query(int i) { return kQueries > 1 ? 2 * i + (threadIdx.x >> 1 & 1) : 0; }

  // `first_weights`, `first_lower` and `first_upper` are those of the first query; the warp's first key is
  // number `first_key` of its unit.
  __device__ __forceinline__ Beside(const Request& r, uint32_t first_weights, const UnitNotes& notes,
                                    const uint32_t* first_lower, const uint32_t* first_upper, int first_key) {
#pragma unroll
    for (int part = 0; part < kColumns / 16; ++part)
      weights[part] = get_16(first_weights + (part * 16 + threadIdx.x % 4 * 4) * 4);
#pragma unroll
    for (int i = 0; i < kStored; ++i) {
      lower[i] = first_lower[query(i)];
      upper[i] = first_upper[query(i)];
    }
    const int own = first_key + key();
    scale = r.scales != nullptr ? notes.scales[own] : 1.f;
    present = r.page == 0 || (notes.present[own / 32] >> own % 32 & 1);
  }
};

// Weighs the products, sums over the heads of each query, and stores what the query sees. `products` is
// laid out as multiply_16x8 says; `first` is the row of the first query, `position` the warp's first key.
template <int kColumns, int kHeads>
__device__ __forceinline__ void reduce(const Request& r, const float (&products)[kColumns / 2],
                                       const Beside<kColumns, kHeads>& beside, int32_t first, uint32_t position) {
  using B = Beside<kColumns, kHeads>;
  float sums[B::kQueries * 2];  // of key lane / 4 and of key lane / 4 + 8
  const auto weigh = [&](auto value) {
#pragma unroll
    for (int query = 0; query < B::kQueries; ++query) {
      float low = 0, high = 0;
#pragma unroll
      for (int part = 0; part < kHeads / 16; ++part) {
        const float4 w = beside.weights[query * (kHeads / 16) + part];
        const int at = (query * kHeads + part * 16) / 2;
        const int head = part * 16 + threadIdx.x % 4 * 2;
        low = fmaf(value(products[at + 0], head), w.x, low);
        high = fmaf(value(products[at + 2], head), w.x, high);
        low = fmaf(value(products[at + 1], head + 1), w.y, low);
        high = fmaf(value(products[at + 3], head + 1), w.y, high);
        low = fmaf(value(products[at + 4], head + 8), w.z, low);
        high = fmaf(value(products[at + 6], head + 8), w.z, high);
        low = fmaf(value(products[at + 5], head + 9), w.w, low);
        high = fmaf(value(products[at + 7], head + 9), w.w, high);
      }
      sums[query * 2] = low;
      sums[query * 2 + 1] = high;
    }
  };
  if (r.heads == kHeads)
    weigh([](float x, int) { return relu(x); });
  else
    // Heads that are only there to fill up: their product with an infinite key would be NaN.
    weigh([&](float x, int head) { return head < r.heads ? relu(x) : 0.f; });

  // Four lanes add up. Each halving leaves a lane with half of the sums: first by key, then by query.
  const bool odd = threadIdx.x & 1, upper_pair = threadIdx.x & 2;
#pragma unroll
  for (int query = 0; query < B::kQueries; ++query) {
    const float sent = odd ? sums[query * 2] : sums[query * 2 + 1];
    const float kept = odd ? sums[query * 2 + 1] : sums[query * 2];
    sums[query] = kept + __shfl_xor_sync(~0u, sent, 1);
  }
  const int64_t at = int64_t(position) + B::key();
  const auto store = [&](int i, float sum) {
    if (at < beside.lower[i] || at >= beside.upper[i]) return;
    if (r.scales != nullptr) sum *= beside.scale;
    r.scores[(first + B::query(i)) * r.pitch + at] = beside.present ? sum : __int_as_float(0xff800000);
  };
  if constexpr (B::kQueries == 1) {
    const float sum = sums[0] + __shfl_xor_sync(~0u, sums[0], 2);
    if (!upper_pair) store(0, sum);
  } else {
#pragma unroll
    for (int i = 0; i < B::kStored; ++i) {
      const float sent = upper_pair ? sums[2 * i] : sums[2 * i + 1];
      const float kept = upper_pair ? sums[2 * i + 1] : sums[2 * i];
      store(i, kept + __shfl_xor_sync(~0u, sent, 2));
    }
  }
}

// -inf where a row doesn't see. One block of the grid a stretch of a row.
__device__ __forceinline__ void fill_unseen(const Request& r) {
  constexpr uint32_t kStretch = 8192;
  const uint64_t stretches = (uint64_t(r.length) + kStretch - 1) / kStretch;
  for (uint64_t i = blockIdx.x; i < stretches * r.rows; i += gridDim.x) {
    const int64_t row = i / stretches;
    const uint64_t from = i % stretches * kStretch, to = min(from + kStretch, uint64_t(r.length));
    uint32_t begin, end;
    clamped_bounds(r.starts, r.ends, row, r.length, begin, end);
    if (r.row_sequences.present()) {
      const int64_t sequence = r.row_sequences.get(row);
      if (sequence < 0 || sequence >= r.sequences) begin = end = 0;
    }
    if (begin <= from && end >= to) continue;
    for (uint64_t at = from + threadIdx.x; at < to; at += blockDim.x)
      if (at < begin || at >= end) r.scores[row * r.pitch + at] = __int_as_float(0xff800000);
  }
}
