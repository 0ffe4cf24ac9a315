// Exact top-K of ragged score rows, after HPC-Ops Top-K (arXiv 2609.08450).
//
// A candidate is one integer, its rank: the key of its score above the complement of its position.
// No two are equal, and their descending order is the order of selection, ties included. So a row's
// set is described by the rank of its K-th best, and whatever keeps the K best ranks of what it has
// seen has lost nothing.
//
//  1. Proposal (the paper's 4.2). A sample of the row fills a histogram of coarse keys, 32 bins an
//     octave. The primary cutoff lies where, K and a few deviations of the sample's rank from the
//     top, the histogram is cut; the secondary one deeper. Within its bin a cutoff is interpolated:
//     it decides how much is collected, never what is selected.
//  2. Collection (4.3). One pass over the row appends what reaches the cutoff to a list in shared
//     memory, and counts it in the leading histogram: bins of a few candidates each, of a width that
//     the sample suggests. The list's length certifies the row: K or more hold the K best.
//  3. Refinement (4.4). The leading histogram says in which bin the K-th lies; the few in it are
//     ranked by comparing all pairs. Where they are many, or there is no such histogram, one over the
//     range of ranks that the list has, 11 bits of it at a time, narrows until they are few. Ties at
//     rank K are decided by the same integers, without a word to the row.
//
// What the paper leaves to spill buffers of a row's size, this does not need:
//
//  - Overfilled lists. As soon as a list is full, the K-th best of what it holds is a lower bound of
//    the row's, so the list is cut down to K, the cutoff is raised to it and the pass goes on. Passes
//    that must cope with anything run tile by tile in the order of positions; then whatever comes
//    later loses every tie to what is held, the raised cutoff is exclusive, and a row of equal scores
//    is read once, not sorted.
//  - Underfilled lists. A second pass takes what lies between the secondary and the primary cutoff.
//    If that is still too little, a histogram of the whole row gives the leading bits of the K-th
//    best, and a last pass collects down to them: it cannot underfill.
//
// What every warp does costs the time of all: blocks are of 512 threads, and what is to be said once is
// scanned by four warps.
//
// Blocks that share a row take a slice each and derive one cutoff from one sample without a word. A
// cluster's members send what they collected to the first one's shared memory; other blocks leave it
// in the workspace, where the last to arrive finds it. What a slice's list loses when it is cut down
// to K is in no row's set.
#pragma once

#include <math_constants.h>
#include <string.h>

#include "../common/order.cuh"
#include "../common/row.cuh"

typedef unsigned long long u64;

constexpr int kBins = 2048;
// Candidates beyond K that a list holds at least, and most that a block hands to another: `SLACK` in
// src/selection/plan.rs.
constexpr int kSlack = 4096;
// Frontiers up to here are ranked by comparing all pairs.
constexpr int kRanked = 256;
// Buckets up to here are ordered by comparing all pairs.
constexpr int kCrowd = 128;
// Vectors that each thread has in flight, and as many again in a long pass.
constexpr int kDepth = 4;
// Words before a block's candidates in the workspace.
constexpr int kHeader = 16;

constexpr unsigned kAllKeys = ~0u;

constexpr int kWarps = kThreads / 32;

enum Order { kUnordered = 0, kByPosition = 1, kByValue = 2 };
enum Route { kDirect = 1, kPrimary = 2, kBand = 3, kRecovered = 4 };
enum BoundKind { kNone = 0, kI32 = 1, kI64 = 2, kU32 = 3 };

// One bound of every row.
struct Bound {
  const void* at;
  long long stride;
  int kind;

  // Inside [0, width]; `missing` where there is none.
  __device__ __forceinline__ int of(long long row, int width, int missing) const {
    long long v = missing;
    if (kind == kI32) v = static_cast<const int*>(at)[row * stride];
    if (kind == kI64) v = static_cast<const long long*>(at)[row * stride];
    // From 2^31 up: a negative number that was stored as unsigned.
    if (kind == kU32) v = static_cast<const int*>(at)[row * stride];
    return (int)min(max(v, 0ll), (long long)width);
  }
};

// `Request` in src/selection/cuda.rs.
struct Request {
  const void* scores;
  long long pitch;
  Bound start, end;
  unsigned* positions;
  float* values;      // or null
  unsigned* counts;
  unsigned* routes;   // or null: four counters a row
  unsigned* workspace;
  int width, k, capacity, stride;
  float margin;  // how many times K the primary cutoff aims at; 0: deviations say it
  float deviations;
  int order, band, fixed_stride;
  int blocks;  // of a row
};
static_assert(sizeof(Bound) == 24 && sizeof(Request) == 144, "src/selection/cuda.rs passes as much");

// How a row's set was found: `RowRoute` in src/selection/buffers.rs. The first thread counts.
struct RouteCounters {
  unsigned route, admitted, raised;
  u64 read;
};

struct Found {
  unsigned bin, above, count;
};

struct State {
  unsigned count;  // appended to the list; beyond the capacity, counted only
  unsigned kept, slots, sent_at;
  unsigned inbox;  // appended to the inbox by all members
  unsigned parts[32], low[32], high[32];
  Found found[2];
  u64 threshold;
  u64 ranked[kRanked];
  RouteCounters counters;  // of this block
  RouteCounters gathered;  // of the row's other blocks
};

// Of this block. By name and not by pointer: through a generic address the compiler would make of every
// atomic something slower than shared memory's own.
__device__ __forceinline__ State& state() {
  __shared__ State of_block;
  return of_block;
}

// Dynamic shared memory: `shared_bytes` in src/selection/plan.rs. Two histograms, candidates from
// kLists on, and behind them the order of the selected.
extern __shared__ uint4 dynamic[];
constexpr int kLists = 2 * kBins * sizeof(unsigned);
__device__ __forceinline__ unsigned* histogram() { return reinterpret_cast<unsigned*>(dynamic); }
__device__ __forceinline__ unsigned* buckets() { return histogram() + kBins; }

// Candidates from the one with this number on.
struct List {
  int first;
  __device__ __forceinline__ u64* at() const {
    return reinterpret_cast<u64*>(reinterpret_cast<char*>(dynamic) + kLists) + first;
  }
  __device__ __forceinline__ u64& operator[](int i) const { return at()[i]; }
};
__device__ __forceinline__ List own_list() { return List{0}; }

// Vectors j, j + kThreads and so on of n > 0; the last, where there are fewer.
template <class T>
__device__ __forceinline__ void load_vectors(const uint4* data, int n, int j, Vector<T> (&v)[kDepth]) {
#pragma unroll
  for (int d = 0; d < kDepth; d++) {
    const uint4 raw = __ldcg(data + min(j + d * kThreads, n - 1));
    memcpy(&v[d], &raw, sizeof(raw));
  }
}

// One row's scores. `head` of them come before the first aligned vector; `vectors` are whole.
template <class T>
struct Scores {
  static constexpr int kWidth = Vector<T>::kWidth;
  const T* data;
  int start, length, head, vectors;

  __device__ Scores(const T* row, int start, int length) : data(row + start), start(start), length(length) {
    const int misaligned = (int)((size_t)data % 16 / sizeof(T));
    head = min(misaligned ? kWidth - misaligned : 0, length);
    vectors = (length - head) / kWidth;
  }
  __device__ __forceinline__ int tail() const { return length - head - vectors * kWidth; }
  __device__ __forceinline__ Vector<T> load(int j) const {
    // Not by way of L1, which has no use for it.
    const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(data + head) + j);
    Vector<T> v;
    memcpy(&v, &raw, sizeof(v));
    return v;
  }
  // The vectors j, j + kThreads and so on of the first n > 0.
  __device__ __forceinline__ void load_from(int j, int n, Vector<T> (&v)[kDepth]) const {
    load_vectors(reinterpret_cast<const uint4*>(data + head), n, j, v);
  }
  // Column of the first element of vector j.
  __device__ __forceinline__ int column(int j) const { return start + head + j * kWidth; }
};

// Of a power of two.
__device__ __forceinline__ int log_of(int x) { return 31 - __clz(x); }

// A block's part of a row: the vectors from `begin` to `end`, and the ends where it has them.
struct Slice {
  int begin, end;
  bool first, last;

  template <class T>
  __device__ Slice(const Scores<T>& scores, int rank, int blocks) {
    const int each = (scores.vectors + blocks - 1) >> log_of(blocks);
    begin = min(rank * each, scores.vectors), end = min(begin + each, scores.vectors);
    first = rank == 0, last = rank == blocks - 1;
  }
  template <class T>
  __device__ __forceinline__ unsigned scores(const Scores<T>& s) const {
    return (end - begin) * Scores<T>::kWidth + (first ? s.head : 0) + (last ? s.tail() : 0);
  }
};

__device__ __forceinline__ u64 rank_of(unsigned key, int position) { return (u64)key << 32 | (unsigned)~position; }
__device__ __forceinline__ unsigned key_in(u64 rank) { return (unsigned)(rank >> 32); }
__device__ __forceinline__ unsigned position_in(u64 rank) { return ~(unsigned)rank; }

// The key of what is no NaN.
__device__ __forceinline__ unsigned key_of_number(float x) {
  const unsigned bits = __float_as_uint(__fadd_rn(x, 0.0f));  // -0 + 0 is +0.
  return bits ^ ((int)bits >> 31 | 0x80000000u);
}

// The bits by which a range of this width splits into bins.
__device__ __forceinline__ int bin_shift(u64 width) { return max(0, 53 - __clzll(width)); }

// Coarse keys: FP16's sign, exponent and five bits of its fraction. Ascending; NaN is in bin 0.
__device__ __forceinline__ unsigned coarse_bin(float x) {
  const unsigned bits = __half_as_ushort(__float2half_rn(x));
  const unsigned key = bits ^ (bits >> 15 ? 0xffffu : 0x8000u);
  return x != x ? 0 : key >> 5;
}
// The value with this FP16 key, of which a coarse bin has 32.
__device__ __forceinline__ float coarse_value(unsigned key) {
  return __half2float(__ushort_as_half((unsigned short)(key ^ (key >> 15 ? 0x8000u : 0xffffu))));
}

// The sums over this thread's bins, from the top, for the first kScanning threads: four warps, since what
// every warp does costs the time of all.
constexpr int kScanning = 128;
struct FromTop {
  static constexpr int kOwn = kBins / kScanning;
  unsigned own[kOwn], inclusive, sum;
  int top;

  // All threads call, and a barrier follows.
  __device__ __forceinline__ explicit FromTop(const unsigned* histogram) {
    if (threadIdx.x >= kScanning) return;
    top = kBins - 1 - (int)threadIdx.x * kOwn;
    sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(histogram + top - i - 3);
      own[i] = four.w, own[i + 1] = four.z, own[i + 2] = four.y, own[i + 3] = four.x;
      sum += four.x + four.y + four.z + four.w;
    }
    inclusive = sum;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const unsigned below = __shfl_up_sync(~0u, inclusive, lanes);
      if (lane >= lanes) inclusive += below;
    }
    if (lane == 31) state().parts[threadIdx.x / 32] = inclusive;
  }

  // The counts above this thread's bins.
  __device__ __forceinline__ unsigned before() const {
    unsigned all = inclusive - sum;
#pragma unroll
    for (int warp = 0; warp < kScanning / 32 - 1; warp++) {
      if (warp < threadIdx.x / 32) all += state().parts[warp];
    }
    return all;
  }
};

// The bin of a histogram, 0 or 1, in which the counts from the top reach `need`, and, for `deeper`, another.
// A bin of ~0 where they don't. With a barrier at the end.
__device__ __noinline__ void find_bins(int which, unsigned need, unsigned deeper) {
  if (threadIdx.x >= kScanning && threadIdx.x < kScanning + 2) {
    state().found[threadIdx.x - kScanning] = Found{~0u, 0, 0};
  }
  const FromTop mine(histogram() + which * kBins);
  __syncthreads();
  if (threadIdx.x < kScanning) {
    const unsigned before = mine.before();
#pragma unroll 1
    for (int n = 0; n < 2; n++) {
      const unsigned reach = n ? deeper : need;
      if (before < reach && reach <= before + mine.sum) {
        unsigned above = before;
#pragma unroll
        for (int i = 0; i < FromTop::kOwn; i++) {
          if (above < reach && reach <= above + mine.own[i]) {
            state().found[n] = Found{(unsigned)(mine.top - i), above, mine.own[i]};
          }
          above += mine.own[i];
        }
      }
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void clear(unsigned* histogram) {
  static_assert(kBins == 4 * kThreads, "a vector a thread");
  reinterpret_cast<uint4*>(histogram)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// The bins of the histogram that a pass builds of what it appends: `shift` bits of the keys from `low` on
// to a bin; what is beyond the last is in it.
struct Leading {
  unsigned low;
  int shift;
  __device__ __forceinline__ unsigned bin(unsigned key) const { return min((key - low) >> shift, kBins - 1u); }
};

struct Keys {
  unsigned least, most;
};

// The least and the greatest key of the ranks from `floor` up. With a barrier.
__device__ __forceinline__ Keys key_range(List list, int n, u64 floor) {
  unsigned least = ~0u, most = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const u64 rank = list[i];
    if (rank >= floor) least = min(least, key_in(rank)), most = max(most, key_in(rank));
  }
  least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) state().low[warp] = least, state().high[warp] = most;
  __syncthreads();
  return {__reduce_min_sync(~0u, lane < kWarps ? state().low[lane] : ~0u),
          __reduce_max_sync(~0u, lane < kWarps ? state().high[lane] : 0)};
}

// The rank of the `need`-th best of n > 0 candidates, need at most n. All threads have arrived, and
// see the list.
__device__ __noinline__ u64 refine(List list, int n, unsigned need) {
  clear(histogram());
  if (threadIdx.x == 0) state().slots = 0;
  const Keys keys = key_range(list, n, 0);
  u64 low = (u64)keys.least << 32, high = (u64)keys.most << 32 | ~0u;
  while (true) {
    const u64 width = high - low;
    const int shift = bin_shift(width);
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const u64 above = list[i] - low;
      if (above <= width) atomicAdd(&histogram()[above >> shift], 1);
    }
    __syncthreads();
    find_bins(0, need, 0);
    const Found found = state().found[0];
    need -= found.above;
    low += (u64)found.bin << shift;
    high = min(high, low + ((1ull << shift) - 1));
    if (found.count == need) return low;
    if (found.count <= kRanked) {
#pragma unroll 1
      for (int i = threadIdx.x; i < n; i += kThreads) {
        const u64 rank = list[i];
        if (rank - low <= high - low) state().ranked[atomicAdd(&state().slots, 1)] = rank;
      }
      __syncthreads();
      const int m = found.count;
      if (threadIdx.x < m) {
        const u64 mine = state().ranked[threadIdx.x];
        unsigned better = 0;
#pragma unroll 4
        for (int other = 0; other < m; other++) better += state().ranked[other] > mine;
        if (better == need - 1) state().threshold = mine;
      }
      __syncthreads();
      return state().threshold;
    }
    clear(histogram());
    __syncthreads();
  }
}

// Cuts a list of n > k candidates down to its k best, in place. The rank of the last of them.
__device__ __noinline__ u64 compact(List list, int n, unsigned k) {
  const u64 threshold = refine(list, n, k);
  if (threadIdx.x == 0) state().kept = 0, state().counters.raised++;
  __syncthreads();
#pragma unroll 1
  for (int base = 0; base < n; base += kThreads) {
    const int i = base + threadIdx.x;
    const u64 rank = i < n ? list[i] : 0;
    const bool keep = i < n && rank >= threshold;
    const unsigned keeps = __ballot_sync(~0u, keep);
    const int lane = threadIdx.x % 32;
    unsigned at = 0;
    if (lane == 0 && keeps) at = atomicAdd(&state().kept, __popc(keeps));
    at = __shfl_sync(~0u, at, 0) + __popc(keeps & ((1u << lane) - 1));
    // What is kept goes to places that have all been read.
    __syncthreads();
    if (keep) list[at] = rank;
  }
  __syncthreads();
  return threshold;
}

// The greatest of a vector; NaN where all are.
__device__ __forceinline__ float greatest(const Vector<float>& v) {
  return fmaxf(fmaxf(v.at[0], v.at[1]), fmaxf(v.at[2], v.at[3]));
}
template <class Pair, class T>
__device__ __forceinline__ float greatest_of_pairs(const Vector<T>& v) {
  Pair pairs[4];
  memcpy(pairs, &v, sizeof(v));
  const Pair most = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(widen(most.x), widen(most.y));
}
__device__ __forceinline__ float greatest(const Vector<__half>& v) { return greatest_of_pairs<__half2>(v); }
__device__ __forceinline__ float greatest(const Vector<__nv_bfloat16>& v) { return greatest_of_pairs<__nv_bfloat162>(v); }

// Element i of words that lie in registers, where there is no index: by halving.
template <int kWords>
__device__ __forceinline__ unsigned pick_word(const unsigned (&words)[kWords], int i) {
  if constexpr (kWords == 1) {
    return words[0];
  } else {
    unsigned half[kWords / 2];
#pragma unroll
    for (int at = 0; at < kWords / 2; at++) half[at] = i & (kWords / 2) ? words[at + kWords / 2] : words[at];
    return pick_word<kWords / 2>(half, i);
  }
}
template <class T>
__device__ __forceinline__ float pick(const Vector<T> (&v)[kDepth], int i) {
  constexpr int kPerWord = 4 / sizeof(T);
  unsigned words[4 * kDepth];
#pragma unroll
  for (int d = 0; d < kDepth; d++) memcpy(words + 4 * d, &v[d], 16);
  const unsigned word = pick_word<4 * kDepth>(words, i / kPerWord);
  if constexpr (kPerWord == 1) return __uint_as_float(word);
  else return widen(from_bits<T>(i & 1 ? word >> 16 : word & 0xffff));
}

// Appends what reaches the cutoff of n > 0 vectors, the first of which lies in this column, until the list is
// over-full. How many were looked at.
template <class T, bool kHeld>
__device__ __forceinline__ int stream_vectors(const uint4* data, int n, int column, float cut, Leading leading,
                                              unsigned capacity, Vector<T> (&held)[kDepth]) {
  constexpr int kWidth = Vector<T>::kWidth;
  int j = threadIdx.x;
  if constexpr (!kHeld) load_vectors(data, n, j, held);
#pragma unroll 1
  while (true) {
    const int base = j - (int)threadIdx.x + kDepth * kThreads;
    // Beyond the end it is the last vector, over and over: cheaper than to ask.
    Vector<T> next[kDepth];
    load_vectors(data, n, j + kDepth * kThreads, next);
    unsigned hits = 0;
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      if (greatest(held[d]) >= cut) {
#pragma unroll
        for (int w = 0; w < kWidth; w++) hits |= (unsigned)(widen(held[d].at[w]) >= cut) << (d * kWidth + w);
      }
    }
    if (hits && base > n) {
      // The last vector may have come more than once.
      const int whole = max(0, (n - j + kThreads - 1) / kThreads);
      if (whole < kDepth) hits &= (1u << (whole * kWidth)) - 1;
    }
    if (hits) {
      unsigned at = atomicAdd(&state().count, __popc(hits));
      if (at + __popc(hits) <= capacity) {
        // Few have many: a loop over what is there is shorter than one over what could be.
#pragma unroll 1
        do {
          const int i = __ffs(hits) - 1;
          hits &= hits - 1;
          const unsigned key = key_of_number(pick(held, i));
          own_list()[at++] = rank_of(key, column + (j + i / kWidth * kThreads) * kWidth + i % kWidth);
          atomicAdd(&buckets()[leading.bin(key)], 1);
        } while (hits);
      }
    }
    if (base >= n || *(volatile unsigned*)&state().count > capacity) return min(base, n);
    j += kDepth * kThreads;
#pragma unroll
    for (int d = 0; d < kDepth; d++) held[d] = next[d];
  }
}

// By itself, with registers of its own.
template <class T>
__device__ __noinline__ int stream_all(const uint4* data, int n, int column, float cut, Leading leading,
                                       unsigned capacity) {
  Vector<T> held[kDepth];
  return stream_vectors<T, false>(data, n, column, cut, leading, capacity, held);
}

// Everything that one block knows of its row.
template <class T>
struct Selector {
  static constexpr int kWidth = Vector<T>::kWidth;
  const Request& request;
  const Scores<T> scores;
  const long long row;
  const int lists;  // in shared memory: one, and another's inbox

  __device__ __forceinline__ Selector(const Request& request, long long row, int start, int end, int lists)
      : request(request),
        scores(static_cast<const T*>(request.scores) + row * request.pitch, start, max(end - start, 0)),
        row(row),
        lists(lists) {}

  __device__ __forceinline__ unsigned k() const { return request.k; }
  __device__ __forceinline__ unsigned capacity() const { return request.capacity; }

  // ---- Proposal.

  // The first score of the fixed view.
  __device__ __forceinline__ int view_start() const { return (int)((row * 17 + 13) & (request.stride - 1)); }

  __device__ __forceinline__ unsigned sample_size() const {
    const int log = log_of(request.stride);
    if (request.fixed_stride) {
      return view_start() < scores.length ? ((scores.length - 1 - view_start()) >> log) + 1 : 0;
    }
    return (scores.vectors >> log & ~1) * kWidth;
  }

  // f(score) for every sampled score.
  template <class F>
  __device__ __forceinline__ void for_each_sampled(F f) const {
    const int stride = request.stride;
    if (request.fixed_stride) {
      const int n = sample_size();
#pragma unroll 2
      for (int i = threadIdx.x; i < n; i += kThreads) f(widen(scores.data[view_start() + (long long)i * stride]));
      return;
    }
    // Two neighbours at a time: memory gives no less than both.
    const int groups = scores.vectors >> log_of(stride) & ~1;
    constexpr int kLoads = 2;
#pragma unroll 1
    for (int base = threadIdx.x; base < groups; base += kLoads * kThreads) {
      Vector<T> v[kLoads];
#pragma unroll
      for (int d = 0; d < kLoads; d++) {
        const int group = min(base + d * kThreads, groups - 1);
        unsigned hash = (group / 2) * 0x9e3779b1u + (unsigned)row * 0x85ebca6bu;
        hash = (hash ^ hash >> 15) * 0x2c1b3c6du;
        hash ^= hash >> 12;
        v[d] = scores.load(((group / 2) * stride + (int)(hash & (stride - 1))) * 2 + group % 2);
      }
#pragma unroll
      for (int d = 0; d < kLoads; d++) {
        if (base + d * kThreads < groups) {
#pragma unroll
          for (int w = 0; w < kWidth; w++) f(widen(v[d].at[w]));
        }
      }
    }
  }

  // How many of a row that the block holds whole.
  __device__ __forceinline__ unsigned held_size() const { return scores.vectors * kWidth >> log_of(request.stride); }

  // The same from the vectors of a row that the block holds whole. About one score in `stride`, its place
  // in the vector a hash.
  template <class F>
  __device__ __forceinline__ void for_each_held(const Vector<T> (&held)[kDepth], F f) const {
    const unsigned stride = request.stride;
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      const unsigned j = threadIdx.x + d * kThreads;
      const unsigned place = (j * 0x9e3779b1u >> 16) & (stride - 1);
      if (j < scores.vectors) {
#pragma unroll
        for (int w = 0; w < kWidth; w++) {
          if (stride <= kWidth ? (w & (stride - 1)) == place : w == place) f(widen(held[d].at[w]));
        }
      }
    }
  }

  struct Proposal {
    // Keys; 0 where there is no number to cut at.
    unsigned primary, secondary;
    Leading leading;
  };

  // `sample` calls f for every one of so many sampled scores. The histogram is clear.
  template <class Sample>
  __device__ __forceinline__ Proposal propose(unsigned sampled, Sample sample) const {
    // Approximate operations will do, alike in all blocks of a row.
    const float fraction = __fdividef(sampled, scores.length);
    const float expected = fraction * k();
    const float deviation = __fsqrt_rn(expected * (1.0f - fraction));
    float aim = request.margin * expected;
    if (request.margin == 0.0f) {
      aim = expected;
      if (fraction < 1.0f) aim += request.deviations * deviation + 0.25f * request.deviations * request.deviations;
    }
    const unsigned need = max(1u, (unsigned)ceilf(aim));
    const unsigned deeper = max(need + 1, (unsigned)ceilf(aim + 3.0f * deviation + 2.0f));
    sample([&](float x) { atomicAdd(&histogram()[coarse_bin(x)], 1); });
    if (threadIdx.x == 0) state().counters.read += sampled;
    __syncthreads();
    find_bins(0, need, deeper);
    const Found first = state().found[0], second = state().found[1];
    if (first.bin != ~0u && first.count * 4 >= sampled && request.stride > 1) {
      return propose_within(first, sampled, need, deeper);
    }
    Proposal proposal;
    proposal.primary = cut_in(first, need);
    proposal.secondary = cut_in(second, deeper);
    proposal.leading = leading_from(proposal.primary, 18, __fdividef(first.count, fraction));
    return proposal;
  }

  // The key at which a coarse bin is cut.
  __device__ __forceinline__ unsigned cut_in(const Found& found, unsigned need) const {
    // What is no number lies in the bins up to -inf's, or in none.
    if (found.bin <= 31 || found.bin == ~0u) return 0;
    // Rounding takes values from a little below an edge.
    int key = (int)(found.bin << 5) - 1;
    if (request.stride > 1) key = (int)(found.bin << 5) + (int)(32.0f - 32.0f * __fdividef(need - found.above, found.count));
    return key_of(coarse_value(min(key, 0xfc00)));
  }

  // A histogram with about 4 of `count` elements, which lie in 2^bits keys, to a bin.
  static __device__ __forceinline__ Leading leading_from(unsigned low, int bits, float count) {
    const int finer = ((int)__float_as_uint(count) >> 23) - 127 - 2;
    return {low, min(max(bits - finer, 0), 20)};
  }

  // Where a bin holds a quarter of the sample, its keys are looked at more closely.
  __device__ __noinline__ Proposal propose_within(Found first, unsigned sampled, unsigned need, unsigned deeper) const {
    Proposal proposal = {0, 0, {0, 0}};
    if (first.bin <= 31) return proposal;
    const unsigned low = key_of(coarse_value((first.bin << 5) - 1));
    const unsigned high = key_of(coarse_value(min((first.bin + 1) << 5, 0xfc00)));
    const int shift = bin_shift((u64)(high - low));
    clear(histogram());
    __syncthreads();
    const unsigned again = sample_size();
    for_each_sampled([&](float x) {
      const unsigned key = key_of(x);
      if (key >= low) atomicAdd(&histogram()[min((key - low) >> shift, kBins - 1)], 1);
    });
    if (threadIdx.x == 0) state().counters.read += again;
    __syncthreads();
    // This sample may be smaller.
    const float ratio = __fdividef(again, sampled);
    find_bins(0, max(1u, (unsigned)ceilf(need * ratio)), max(1u, (unsigned)ceilf(deeper * ratio)));
    const Found inner = state().found[0], deep = state().found[1];
    if (inner.bin != ~0u) proposal.primary = low + (inner.bin << shift);
    if (deep.bin != ~0u) proposal.secondary = low + (deep.bin << shift);
    proposal.leading = leading_from(proposal.primary, shift, __fdividef((float)inner.count * scores.length, again));
    return proposal;
  }

  // ---- Collection.

  // The vectors j, j + kThreads and so on of a slice that has any.
  __device__ __forceinline__ void load(Vector<T> (&v)[kDepth], const Slice& slice, int j) const {
    if (slice.end > slice.begin) scores.load_from(j, slice.end, v);
  }

  // f(score, column) for the few scores before the first vector and after the last.
  template <class F>
  __device__ __forceinline__ void ends(const Slice& slice, F f) const {
    const int i = threadIdx.x;
    if (slice.first && i < scores.head) f(widen(scores.data[i]), scores.start + i);
    const int tail = i - 32;
    if (slice.last && tail >= 0 && tail < scores.tail()) {
      const int at = scores.length - scores.tail() + tail;
      f(widen(scores.data[at]), scores.start + at);
    }
  }

  __device__ __forceinline__ void append(unsigned at, float x, int column) const {
    if (at < capacity()) own_list()[at] = rank_of(key_of(x), column);
  }

  // Appends what reaches the cutoff, a number, in no order, and counts it in the leading histogram; ends
  // early once the list is over-full. Held vectors are the first; others are loaded here. With a barrier.
  template <bool kHeld>
  __device__ __forceinline__ void stream(const Slice& slice, float cut, Leading leading, Vector<T> (&held)[kDepth]) const {
    ends(slice, [&](float x, int column) {
      if (x >= cut) {
        append(atomicAdd(&state().count, 1), x, column);
        atomicAdd(&buckets()[leading.bin(key_of_number(x))], 1);
      }
    });
    const int n = slice.end - slice.begin, column = scores.column(slice.begin);
    const uint4* data = reinterpret_cast<const uint4*>(scores.data + scores.head) + slice.begin;
    int seen = 0;
    if (n > 0) {
      if constexpr (kHeld) seen = stream_vectors<T, true>(data, n, column, cut, leading, capacity(), held);
      else seen = stream_all<T>(data, n, column, cut, leading, capacity());
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      state().counters.read += min(seen * kWidth, (int)slice.scores(scores));
      state().counters.admitted += state().count;
    }
  }

  // Appends a thread's part of a chunk; how many, and whether they went beyond the capacity.
  __device__ __forceinline__ bool append_keys(const unsigned (&keys)[kWidth], unsigned mask, int column,
                                              unsigned* appended) const {
    *appended = __popc(mask);
    if (!mask) return false;
    unsigned at = atomicAdd(&state().count, *appended);
    const bool over = at + *appended > capacity();
#pragma unroll
    for (int w = 0; w < kWidth; w++) {
      if (mask >> w & 1) {
        if (at < capacity()) own_list()[at] = rank_of(keys[w], column + w);
        at++;
      }
    }
    return over;
  }

  __device__ __forceinline__ unsigned in_range(const unsigned (&keys)[kWidth], unsigned valid, unsigned low,
                                               unsigned high) const {
    unsigned mask = 0;
#pragma unroll
    for (int w = 0; w < kWidth; w++) mask |= (unsigned)(keys[w] >= low && keys[w] < high) << w;
    return mask & valid;
  }

  // Appends a chunk, one vector a thread in the order of positions, whatever it takes: where it does
  // not fit, the list is cut down to its K best, and only what beats them all is still of interest.
  // All threads call, and have arrived.
  __device__ __noinline__ void append_chunk(const unsigned (&keys)[kWidth], unsigned valid, int column, unsigned* low,
                                            unsigned high) const {
    constexpr int kParts = (kThreads * kWidth + kSlack - 1) / kSlack;
#pragma unroll 1
    for (int part = 0; part < kParts; part++) {
      const unsigned mine = threadIdx.x / (kThreads / kParts) == part ? valid : 0;
      unsigned appended;
      if (__syncthreads_or(append_keys(keys, in_range(keys, mine, *low, high), column, &appended))) {
        if (appended) atomicSub(&state().count, appended);
        __syncthreads();
        const unsigned n = state().count;
        // Over-full by at most kSlack: more than K were there before.
        const u64 threshold = compact(own_list(), n, k());
        if (threadIdx.x == 0) state().count = k();
        *low = max(*low, key_in(threshold) + 1);
        __syncthreads();
        append_keys(keys, in_range(keys, mine, *low, high), column, &appended);
        __syncthreads();
      }
    }
  }

  // Appends the scores whose keys lie in [low, high), tile by tile in the order of positions,
  // whatever they are. All threads have arrived; with a barrier at the end.
  __device__ __noinline__ void collect(const Slice& slice, unsigned low, unsigned high) const {
    const unsigned before = state().count;
    __syncthreads();
    unsigned keys[kWidth];
    // The head and the tail are chunks of single scores.
    const auto single = [&](bool mine, int at) {
#pragma unroll
      for (int w = 0; w < kWidth; w++) keys[w] = 0;
      if (mine) keys[0] = key_of(widen(scores.data[at]));
      append_chunk(keys, mine, scores.start + at, &low, high);
    };
    if (slice.first && scores.head) single((int)threadIdx.x < scores.head, threadIdx.x);
#pragma unroll 1
    for (int base = slice.begin; base < slice.end; base += kDepth * kThreads) {
      const int j = base + threadIdx.x;
      Vector<T> v[kDepth];
      load(v, slice, j);
      unsigned all = 0;
      bool over = false;
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        if (j + d * kThreads < slice.end) {
#pragma unroll
          for (int w = 0; w < kWidth; w++) keys[w] = key_of(widen(v[d].at[w]));
          unsigned appended;
          over |= append_keys(keys, in_range(keys, ~0u, low, high), scores.column(j + d * kThreads), &appended);
          all += appended;
        }
      }
      if (__syncthreads_or(over)) {
        if (all) atomicSub(&state().count, all);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < kDepth; d++) {
          const bool mine = j + d * kThreads < slice.end;
#pragma unroll
          for (int w = 0; w < kWidth; w++) keys[w] = mine ? key_of(widen(v[d].at[w])) : 0;
          append_chunk(keys, mine ? ~0u : 0, scores.column(j + d * kThreads), &low, high);
        }
      }
    }
    if (slice.last && scores.tail()) {
      const int at = scores.length - scores.tail() + threadIdx.x;
      single(at < scores.length, at);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      state().counters.read += slice.scores(scores);
      state().counters.admitted += max(state().count, before) - before;
    }
  }

  // A slice's best: the K best of it, or all that reaches the cutoff. The list is empty; with a
  // barrier at the end. Whether the leading histogram counts what the list holds.
  template <bool kHeld>
  __device__ __forceinline__ bool collect_primary(const Slice& slice, const Proposal& proposal,
                                                  Vector<T> (&held)[kDepth]) const {
    if (proposal.primary <= kNegInfinityKey) {
      collect(slice, 0, kAllKeys);
      return false;
    }
    stream<kHeld>(slice, value_of(proposal.primary), proposal.leading, held);
    if (state().count <= capacity()) return true;
    // Any K candidates bound the K-th best from below. The last to find no room had up to 32.
    const u64 threshold = compact(own_list(), capacity() - 32, k());
    if (threadIdx.x == 0) state().count = 0;
    __syncthreads();
    collect(slice, key_in(threshold), kAllKeys);
    return false;
  }

  // Counts the leading bits of the keys below `high`. With a barrier at the end.
  __device__ __noinline__ void count_leading(const Slice& slice, unsigned high) const {
    clear(histogram());
    __syncthreads();
    const auto count = [&](float x, int) {
      const unsigned key = key_of(x);
      if (key < high) atomicAdd(&histogram()[key >> 21], 1);
    };
    ends(slice, count);
#pragma unroll 1
    for (int base = slice.begin; base < slice.end; base += kDepth * kThreads) {
      const int j = base + threadIdx.x;
      Vector<T> v[kDepth];
      load(v, slice, j);
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        if (j + d * kThreads < slice.end) {
#pragma unroll
          for (int w = 0; w < kWidth; w++) count(widen(v[d].at[w]), 0);
        }
      }
    }
    if (threadIdx.x == 0) state().counters.read += slice.scores(scores);
    __syncthreads();
  }

  // The row's K best or more, after the pass down to the primary cutoff found fewer, all of them in
  // the list. How many are in the list then is the same for all that call.
  __device__ __noinline__ int recover(const Slice& slice, const Proposal& proposal) const {
    unsigned low = proposal.primary;
    int route = kPrimary;
    if (request.band && proposal.secondary < low) {
      route = kBand;
      collect(slice, proposal.secondary, low);
      low = proposal.secondary;
    }
    if (state().count >= k()) return route;
    const unsigned need = k() - state().count;
    __syncthreads();
    count_leading(slice, low);
    find_bins(0, need, 0);
    collect(slice, state().found[0].bin << 21, low);
    return kRecovered;
  }

  // ---- Output.

  __device__ __forceinline__ void put(unsigned at, u64 rank) const {
    request.positions[row * k() + at] = position_in(rank);
    if (request.values) request.values[row * k() + at] = value_of(key_in(rank));
  }

  // The count, and what follows the last position.
  __device__ __forceinline__ void put_rest(unsigned count) const {
    if (threadIdx.x == 0) request.counts[row] = count;
#pragma unroll 1
    for (unsigned i = count + threadIdx.x; i < k(); i += kThreads) {
      request.positions[row * k() + i] = ~0u;
      if (request.values) request.values[row * k() + i] = -CUDART_INF_F;
    }
  }

  // A row of at most K scores whose values don't matter.
  __device__ __forceinline__ void put_all() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < scores.length; i += kThreads) request.positions[row * k() + i] = scores.start + i;
    put_rest(scores.length);
    put_route(kDirect);
  }

  __device__ __forceinline__ void put_route(int route) const {
    if (request.routes && threadIdx.x == 0) {
      const RouteCounters &own = state().counters, &others = state().gathered;
      const uint4 all = {(unsigned)route, own.admitted + others.admitted, own.raised + others.raised,
                         (unsigned)((own.read + others.read + 15) / 16)};
      reinterpret_cast<uint4*>(request.routes)[row] = all;
    }
  }

  // The best of n candidates to the output. All threads have arrived, and see the list. `leading` are
  // bins for keys that are all at least its `low`; `counted` says that the leading histogram is there.
  __device__ __forceinline__ void finish(List list, int n, int route, Leading leading, bool counted) const {
    put_route(route);
    const unsigned count = min((unsigned)n, k());
    if (n <= (int)k() || request.order != kUnordered || route != kPrimary) {
      finish_any(list, n, count);
    } else {
      finish_primary(list, n, leading, counted);
    }
    put_rest(count);
  }

  __device__ __noinline__ void finish_any(List list, int n, unsigned count) const {
    const u64 threshold = n > (int)count ? refine(list, n, count) : 0;
    if (request.order != kUnordered) put_ordered(list, n, threshold, count);
    else put_unordered(list, n, [&](u64 rank) { return rank >= threshold; });
  }

  // The candidates that `keep` names, by one word a warp to the others.
  template <class Keep>
  __device__ __forceinline__ void put_unordered(List list, int n, Keep keep) const {
    if (threadIdx.x == 0) state().kept = 0;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    unsigned total = 0;
#pragma unroll 1
    for (int base = 0; base < n; base += kThreads) {
      const int i = base + threadIdx.x;
      total += __popc(__ballot_sync(~0u, i < n && keep(list[i])));
    }
    unsigned at = 0;
    if (lane == 0) at = atomicAdd(&state().kept, total);
    at = __shfl_sync(~0u, at, 0);
#pragma unroll 1
    for (int base = 0; base < n; base += kThreads) {
      const int i = base + threadIdx.x;
      const u64 rank = i < n ? list[i] : 0;
      const bool mine = i < n && keep(rank);
      const unsigned keeps = __ballot_sync(~0u, mine);
      if (mine) put(at + __popc(keeps & ((1u << lane) - 1)), rank);
      at += __popc(keeps);
    }
  }

  // More than K candidates in any order: those in the bins above that of the K-th, and of its bin those that
  // all pairs say.
  __device__ __forceinline__ void finish_primary(List list, int n, Leading leading, bool counted) const {
    if (!counted) {
      clear(buckets());
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < n; i += kThreads) atomicAdd(&buckets()[leading.bin(key_in(list[i]))], 1);
      __syncthreads();
    }
    if (threadIdx.x == 0) state().kept = 0, state().slots = 0;
    find_bins(1, k(), 0);
    const Found found = state().found[0];
    // Too much in one bin, or beyond the last: by the whole range of the candidates.
    if (found.count > kRanked || found.bin == kBins - 1) return finish_any(list, n, k());
    const int lane = threadIdx.x % 32;
    unsigned total = 0;
#pragma unroll 1
    for (int base = 0; base < n; base += kThreads) {
      const int i = base + threadIdx.x;
      unsigned bin = 0;
      if (i < n) {
        const u64 rank = list[i];
        bin = leading.bin(key_in(rank));
        if (bin == found.bin) state().ranked[atomicAdd(&state().slots, 1)] = rank;
      }
      total += __popc(__ballot_sync(~0u, i < n && bin > found.bin));
    }
    unsigned at = 0;
    if (lane == 0) at = atomicAdd(&state().kept, total);
    at = __shfl_sync(~0u, at, 0);
    __syncthreads();
#pragma unroll 1
    for (int base = 0; base < n; base += kThreads) {
      const int i = base + threadIdx.x;
      const u64 rank = i < n ? list[i] : 0;
      const bool mine = i < n && leading.bin(key_in(rank)) > found.bin;
      const unsigned keeps = __ballot_sync(~0u, mine);
      if (mine) put(at + __popc(keeps & ((1u << lane) - 1)), rank);
      at += __popc(keeps);
    }
    const int m = found.count;
    if (threadIdx.x < m) {
      const u64 mine = state().ranked[threadIdx.x];
      unsigned better = found.above;
#pragma unroll 4
      for (int other = 0; other < m; other++) better += state().ranked[other] > mine;
      if (better < k()) put(better, mine);
    }
  }

  // Bucket sort of the selected: by their bits, then within each bucket by comparing all pairs.
  __device__ __noinline__ void put_ordered(List list, int n, u64 threshold, unsigned count) const {
    const bool by_value = request.order == kByValue;
    // Descending in both orders: a position's complement is the low word.
    const u64 mask = by_value ? ~0ull : 0xffffffffull;
    u64 low = (unsigned)~(scores.start + scores.length - 1), high = (unsigned)~scores.start;
    __syncthreads();
    clear(buckets());
    if (by_value) {
      const Keys keys = key_range(list, n, threshold);
      low = (u64)keys.least << 32, high = (u64)keys.most << 32 | ~0u;
    } else {
      __syncthreads();
    }
    const int shift = bin_shift(high - low);
    const auto bucket = [&](u64 rank) { return (unsigned)(((rank & mask) - low) >> shift); };
#pragma unroll 2
    for (int i = threadIdx.x; i < n; i += kThreads) {
      if (list[i] >= threshold) atomicAdd(&buckets()[bucket(list[i])], 1);
    }
    __syncthreads();
    unsigned* offsets = histogram();
    const FromTop mine(buckets());
    __syncthreads();
    bool crowded = false;
    if (threadIdx.x < kScanning) {
      unsigned before = mine.before();
#pragma unroll
      for (int i = 0; i < FromTop::kOwn; i++) {
        offsets[mine.top - i] = before, before += mine.own[i];
        crowded |= mine.own[i] > kCrowd;
      }
    }
    crowded = __syncthreads_or(crowded);
#pragma unroll 2
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const u64 rank = list[i];
      if (rank >= threshold) {
        const unsigned b = bucket(rank);
        sorted()[offsets[b] + atomicSub(&buckets()[b], 1) - 1] = i;
      }
    }
    __syncthreads();
    if (crowded) {
      sort(list, count, mask);
#pragma unroll 1
      for (unsigned i = threadIdx.x; i < count; i += kThreads) put(i, list[sorted()[i]]);
      return;
    }
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < count; i += kThreads) {
      const u64 rank = list[sorted()[i]];
      const unsigned b = bucket(rank);
      const unsigned first = offsets[b], end = b ? offsets[b - 1] : count;
      unsigned at = first;
#pragma unroll 1
      for (unsigned other = first; other < end; other++) {
        at += (list[sorted()[other]] & mask) > (rank & mask);
      }
      put(at, rank);
    }
  }

  // Numbers of selected candidates, behind the lists.
  __device__ __forceinline__ unsigned short* sorted() const {
    return reinterpret_cast<unsigned short*>(List{(int)capacity() * lists}.at());
  }

  // Bitonic sort of the selected, descending: where too many share a bucket.
  __device__ __noinline__ void sort(List list, unsigned count, u64 mask) const {
    constexpr unsigned short kLast = 0xffff;
    unsigned size = 1;
    while (size < count) size *= 2;
    for (unsigned i = count + threadIdx.x; i < size; i += kThreads) sorted()[i] = kLast;
    __syncthreads();
    const auto key = [&](unsigned short i) { return i == kLast ? 0 : (list[i] & mask) + 1; };
#pragma unroll 1
    for (unsigned run = 2; run <= size; run *= 2) {
#pragma unroll 1
      for (unsigned gap = run / 2; gap > 0; gap /= 2) {
#pragma unroll 1
        for (unsigned pair = threadIdx.x; pair < size / 2; pair += kThreads) {
          const unsigned a = pair / gap * 2 * gap + pair % gap, b = a + gap;
          const unsigned short x = sorted()[a], y = sorted()[b];
          const bool descending = (a & run) == 0;
          if ((key(x) < key(y)) == descending && key(x) != key(y)) sorted()[a] = y, sorted()[b] = x;
        }
        __syncthreads();
      }
    }
  }
};

// What every block begins with. With a barrier.
__device__ __forceinline__ void begin() {
  clear(histogram());
  clear(buckets());
  if (threadIdx.x == 0) {
    state().count = 0, state().inbox = 0;
    state().counters = state().gathered = RouteCounters{0, 0, 0, 0};
  }
  __syncthreads();
}

// Sends for a block's part of the row, to L2, as if it had all of the width: before the bounds are known.
template <class T>
__device__ __forceinline__ void prefetch(const Request& request, long long row, int rank, int blocks) {
  constexpr int kLine = 128 / sizeof(T);
  const int each = (request.width + blocks - 1) >> log_of(blocks);
  const int at = rank * each + threadIdx.x * kLine;
  if (threadIdx.x * kLine < each && at < request.width) {
    const T* line = static_cast<const T*>(request.scores) + row * request.pitch + at;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
}

// Whether a row needs no scores.
__device__ __forceinline__ bool is_trivial(const Request& request, int length) {
  return length <= 0 || (length <= request.k && request.order != kByValue && !request.values);
}
