// Attention over positions: what its kernels share.
//
// 1. A unit of work is a row of queries and a tile of heads that share a key head. Its keys are those
//    that the row's list names, in the list's order; what the row may not see has no place in memory.
// 2. The keys come in segments, whose length depends on the width of the lists alone. Each segment is
//    a softmax of its own: greatest score, sum, and values weighed relative to the greatest. Segments
//    are then merged in their order.
// 3. With many units a block takes all segments of a unit, merging as it goes. With few, every segment
//    has a block of its own, or a cluster (sm90_sparse_latent_few.cuh), which leaves its part in memory,
//    and `sparse_merge` merges them. The arithmetic is the same, so a row gives the same bits in any batch.
//
// Scores are kept times log2(e): exponentials are powers of two.

#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "ints.cuh"

namespace sparse {

// Keys or values: strides in elements.
struct Vectors {
  const void* at;
  int64_t outer;  // of a sequence or a page
  int64_t token;
  int64_t head;
};

// What an asynchronous copy of nothing may name: it is not read, but is to be aligned.
template <typename T>
__device__ inline const T* aligned_down(const T* at) {
  return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(at) & ~uintptr_t(15));
}

struct Request {
  const void* q;
  int64_t q_row, q_head;
  Vectors keys, values;
  const uint32_t* positions;
  int64_t list_row, list_head, list_entry;
  Ints counts, starts, ends, sequences, table;
  const float* sink;
  int64_t sink_stride;
  void* out;
  int64_t out_row, out_head;
  float* lse;
  int64_t lse_row, lse_head;
  float* parts;
  int64_t length;  // positions of a sequence
  int64_t sequence_count;
  int64_t rows_each;  // rows of a sequence, where no map says which is whose
  int64_t page;       // positions of a page; 0: there is no table
  int64_t pages;
  int64_t width;    // entries of a list
  int64_t segment;  // keys of a segment, a multiple of 128
  int64_t first_unit;
  int64_t rows;
  int32_t segments;
  int32_t split;         // whether every segment has a block of its own
  int32_t group;         // heads of a key head
  int32_t head_tiles;    // tiles of a group
  int32_t column_tiles;  // tiles of the columns of a value
  int32_t tiles;         // units of a row
  int32_t slot_heads, slot_columns;
  int32_t key_dim, value_dim;
  int32_t block_shift;  // log2 of the keys that a position names
  int32_t aligned;      // bits: queries, keys, values, output lie at multiples of 16 bytes
  float scale;          // times log2(e)
  int32_t units;        // units of the launch
  int32_t tile_rows;    // rows that share what they read
  int32_t unused;
};

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr uint32_t kNone = 0xffffffffu;
constexpr int64_t kNowhere = -1;

__device__ inline float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The greater; NaN if one is.
__device__ inline float greater(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }

// What exponentials are taken relative to: no difference of infinities while nothing is seen.
__device__ inline float reference(float max) { return max == minus_infinity() ? 0.f : max; }

// What the weights of a row are relative to follows its greatest score from afar, so that most blocks
// move nothing: weights go to 2^8, which f16 holds, too. Sums of values beyond 2^120 may overflow.
__device__ inline float follow(float before, float most) {
  constexpr float kAfar = 8.f;
  return most <= before + kAfar ? before : greater(before, most);
}
// What is multiplied by to become relative to another.
__device__ inline float moved(float before, float after) {
  return before == after ? 1.f : power(before - reference(after));
}

// Sums over what has been merged, of one head, relative to a score that follows the greatest from
// afar: as long as it stays, parts are added to what there is, and nothing else.
struct Running {
  float max = minus_infinity();
  float sum = 0.f;

  // Takes in a segment; what the values so far and its own are to be multiplied by. Nothing is to be
  // done for a segment without a score above -inf: false.
  __device__ bool merge(float segment_max, float segment_sum, float& own, float& other) {
    constexpr float kFar = 32.f;
    own = 1.f;
    other = 0.f;
    if (segment_max == minus_infinity()) return false;
    if (!(segment_max <= max + kFar) && !isnan(max)) {
      own = power(max - segment_max);
      max = segment_max;
    }
    other = power(segment_max - max);
    sum = merged(sum, own, segment_sum, other);
    return true;
  }
  __device__ static float merged(float run, float own, float segment, float other) {
    float y;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(run), "f"(own), "f"(added(segment, other)));
    return y;
  }
  // What is added to `run` where it is kept.
  __device__ static float added(float segment, float other) {
    float y;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(segment), "f"(other));
    return y;
  }
  __device__ float lse() const {
    if (isinf(max)) return max;
    return __fmaf_rn(max, kLn2, logf(sum));
  }
  // What sums of values are multiplied by in the end. A sink takes its share.
  __device__ float share(bool has_sink, float sink) const {
    return 1.f / (has_sink ? sum + power(__fmul_rn(sink, kLog2E) - max) : sum);
  }
  // A number of the output; there is no -0, which depends on what was added. An empty row's values
  // may be no numbers, but have no weight.
  __device__ float finished(float run, float share) const {
    return max == minus_infinity() ? 0.f : __fmaf_rn(run, share, 0.f);
  }
};

// A quotient of numbers that are not negative. Most are of 32 bits, and many divisors 1.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  if (b == 1) return a;
  return ((a | b) >> 32) == 0 ? static_cast<int64_t>(uint32_t(a) / uint32_t(b)) : a / b;
}

// A unit of work.
struct Unit {
  int64_t row;
  int kv_head;
  int first_head;  // of the row's
  int heads;       // in the tile
  int column;      // the first of the values' columns

  __device__ Unit(const Request& r, int64_t unit) {
    row = unit / r.tiles;
    int tile = static_cast<int>(unit % r.tiles);
    column = tile % r.column_tiles * r.slot_columns;
    tile /= r.column_tiles;
    kv_head = tile / r.head_tiles;
    int first = tile % r.head_tiles * r.slot_heads;
    first_head = kv_head * r.group + first;
    heads = min(r.slot_heads, r.group - first);
  }
};

// The list of a unit, and where its keys lie.
struct Finder {
  const uint32_t* list;
  int64_t sequence, start, end;
  int64_t keys;  // named by the list

  __device__ Finder(const Request& r, int64_t row, int kv_head) {
    list = r.positions + row * r.list_row + kv_head * r.list_head;
    sequence = r.sequences.present() ? r.sequences.get(row) : row / r.rows_each;
    start = 0;
    end = r.length;
    if (r.starts.present()) start = min(max(r.starts.get(row), int64_t(0)), r.length);
    if (r.ends.present()) end = min(max(r.ends.get(row), int64_t(0)), r.length);
    int64_t entries = r.width;
    if (r.counts.present()) entries = min(max(r.counts.get(row), int64_t(0)), entries);
    if (sequence < 0 || sequence >= r.sequence_count || end <= start) entries = 0;
    keys = entries << r.block_shift;
  }

  // What the list has for key `i`.
  __device__ uint32_t entry(const Request& r, int64_t i) const {
    return i < keys ? list[(i >> r.block_shift) * r.list_entry] : kNone;
  }
  // Its position, if the row sees it.
  __device__ int64_t position(const Request& r, int64_t i, uint32_t entry) const {
    int64_t within = i & ((int64_t(1) << r.block_shift) - 1);
    int64_t position = (int64_t(entry) << r.block_shift) + within;
    return entry != kNone && position >= start && position < end ? position : kNowhere;
  }
  // The sequence or the page that holds a position.
  __device__ int64_t outer(const Request& r, int64_t position) const {
    if (position < 0 || r.page == 0) return sequence;
    return r.table.get(sequence, uint32_t(position) / uint32_t(r.page));
  }
  // Where its key or value begins, in elements.
  __device__ static int64_t at(const Request& r, const Vectors& vectors, int64_t position, int64_t outer) {
    if (position < 0) return kNowhere;
    if (r.page != 0) {
      if (outer < 0 || outer >= r.pages) return kNowhere;
      position = uint32_t(position) % uint32_t(r.page);
    }
    return outer * vectors.outer + position * vectors.token;
  }
};

template <typename T>
__device__ inline float wide(T x);
template <>
__device__ inline float wide(float x) {
  return x;
}
template <>
__device__ inline float wide(__half x) {
  return __half2float(x);
}
template <>
__device__ inline float wide(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ inline T narrow(float x);
template <>
__device__ inline float narrow(float x) {
  return x;
}
template <>
__device__ inline __half narrow(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 narrow(float x) {
  return __float2bfloat16_rn(x);
}

// Two numbers rounded, the first in the lower half.
template <typename T>
__device__ inline uint32_t pair(float x, float y);
template <>
__device__ inline uint32_t pair<__half>(float x, float y) {
  __half2 two = __floats2half2_rn(x, y);
  return *reinterpret_cast<uint32_t*>(&two);
}
template <>
__device__ inline uint32_t pair<__nv_bfloat16>(float x, float y) {
  __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<uint32_t*>(&two);
}

// What rounding leaves of two numbers, rounded. Weights of bf16 go in two terms: one alone is off by
// 2^-9, and shows in rows with few keys. f16 is eight times finer, and one will do.
template <typename T>
struct Terms {
  static constexpr int kCount = 1;
};
template <>
struct Terms<__nv_bfloat16> {
  static constexpr int kCount = 2;
};
__device__ inline uint32_t second_term(float x, float y, uint32_t first) {
  float low = __uint_as_float(first << 16), high = __uint_as_float(first & 0xffff0000u);
  return pair<__nv_bfloat16>(x - low, y - high);
}
// Whether so many keys share the weight that one term will do, from the sum of what a row has weighed
// so far and the sum of its squares: n equal weights have n times as large a square of the sum.
// Rounding that knows nothing of the values moves their mean by their size times some 2^-10 / sqrt(n):
// with 64 no more than rounding the result to bf16 does. Weights that all round alike move it by up to
// 2^-8 of the mean size. Later keys only make it less.
__device__ inline bool are_many(float sum, float squares) {
  constexpr float kMany = 64.f;
  return kMany * squares <= sum * sum;
}

// 16 bytes to shared memory, or zeros. The distances are constants.
template <int kTo, int kFrom>
__device__ inline void copy_async(uint32_t to, const void* from, bool exists) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0 + %3], [%1 + %4], 16, p;\n}" ::"r"(to),
      "l"(from), "r"(int(exists)), "n"(kTo), "n"(kFrom)
      : "memory");
}

// Eight numbers that need not lie at a multiple of 16 bytes, or zeros.
__device__ inline uint4 load_singly(const uint16_t* from, bool exists) {
  uint32_t x[4] = {};
  if (exists)
    for (int i = 0; i < 4; i++) x[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
  return make_uint4(x[0], x[1], x[2], x[3]);
}

// Over the four lanes that have a row of a product.
__device__ inline float greatest_of_row(float x) {
  x = greater(x, __shfl_xor_sync(~0u, x, 1));
  return greater(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  x += __shfl_xor_sync(~0u, x, 2);
  return x;
}
// A thread's greatest scores, of each of its two rows in two parts, which don't wait for each other.
__device__ inline void greatest_scores(const float (&s)[32], float (&most)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) most[i] = s[i];
#pragma unroll
  for (int i = 4; i < 32; i++) most[i % 4] = greater(most[i % 4], s[i]);
}

// A part in memory: the values of `slot_heads` heads, then their greatest scores, then their sums.
__device__ inline int64_t slot_floats(const Request& r) { return int64_t(r.slot_heads) * (r.slot_columns + 2); }

// A block a head of a unit: merges the parts of all segments.
template <typename T>
__device__ void merge(const Request& r) {
  int64_t local = blockIdx.x / r.slot_heads;
  int head = blockIdx.x % r.slot_heads;
  Unit unit(r, r.first_unit + local);
  if (head >= unit.heads) return;
  int64_t slot = slot_floats(r);
  const float* parts = r.parts + local * r.segments * slot;
  int columns = min(r.slot_columns, r.value_dim - unit.column);
  int row_head = unit.first_head + head;
  float sink = r.sink ? r.sink[row_head * r.sink_stride] : 0.f;
  T* out = static_cast<T*>(r.out) + unit.row * r.out_row + row_head * r.out_head + unit.column;
  const float* sums = parts + int64_t(r.slot_heads) * r.slot_columns + head;
  for (int column = 4 * threadIdx.x; column < r.slot_columns; column += 4 * blockDim.x) {
    Running running;
    float run[4] = {};
    constexpr int kAtATime = 4;  // so that loads don't wait for each other
    for (int first = 0; first < r.segments; first += kAtATime) {
      float maxima[kAtATime], weights[kAtATime];
      float4 o[kAtATime];
#pragma unroll
      for (int i = 0; i < kAtATime; i++) {
        int64_t at = slot * min(first + i, r.segments - 1);
        maxima[i] = first + i < r.segments ? sums[at] : minus_infinity();
        weights[i] = sums[at + r.slot_heads];
        o[i] = *reinterpret_cast<const float4*>(parts + at + head * r.slot_columns + column);
      }
#pragma unroll
      for (int i = 0; i < kAtATime; i++) {
        float own, other;
        if (!running.merge(maxima[i], weights[i], own, other)) continue;
        run[0] = Running::merged(run[0], own, o[i].x, other);
        run[1] = Running::merged(run[1], own, o[i].y, other);
        run[2] = Running::merged(run[2], own, o[i].z, other);
        run[3] = Running::merged(run[3], own, o[i].w, other);
      }
    }
    float share = running.share(r.sink != nullptr, sink);
    for (int i = 0; i < 4; i++)
      if (column + i < columns) out[column + i] = narrow<T>(running.finished(run[i], share));
    if (column == 0 && unit.column == 0) r.lse[unit.row * r.lse_row + row_head * r.lse_head] = running.lse();
  }
}

}  // namespace sparse
