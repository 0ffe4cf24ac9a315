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
//     memory. Its length certifies the row: K or more hold the K best.
//  3. Refinement (4.4). A histogram over the range of ranks that the list has, 11 bits of it at a
//     time, narrows to the bin that the K-th lies in; as soon as few are left in it, they are ranked
//     by comparing all pairs. Ties at rank K are decided by the same integers, without a word to the
//     row.
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
// Blocks that share a row take a slice each and derive one cutoff from one sample without a word. A
// cluster's members send what they collected to the first one's shared memory; other blocks leave it
// in the workspace, where the last to arrive finds it. What a slice's list loses when it is cut down
// to K is in no row's set.
#pragma once

#include <math_constants.h>

#include "../common/block.cuh"
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
// Vectors that each thread has in flight.
constexpr int kDepth = 4;
// Words before a block's candidates in the workspace.
constexpr int kHeader = 16;

constexpr unsigned kAllKeys = ~0u;

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
  // Column of the first element of vector j.
  __device__ __forceinline__ int column(int j) const { return start + head + j * kWidth; }
};

// A block's part of a row: the vectors from `begin` to `end`, and the ends where it has them.
struct Slice {
  int begin, end;
  bool first, last;

  template <class T>
  __device__ Slice(const Scores<T>& scores, int rank, int blocks) {
    const int each = (scores.vectors + blocks - 1) / blocks;
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

// The bits by which a range of this width splits into bins.
__device__ __forceinline__ int bin_shift(u64 width) { return max(0, 53 - __clzll(width)); }

// Coarse keys: FP16's sign, exponent and five bits of its fraction. Ascending; NaN is in bin 0.
__device__ __forceinline__ unsigned coarse_bin(float x) {
  const unsigned bits = __half_as_ushort(__float2half_rn(x));
  const unsigned key = bits ^ (bits >> 15 ? 0xffffu : 0x8000u);
  return x != x ? 0 : key >> 5;
}
// The least value of a coarse bin, before rounding.
__device__ __forceinline__ float coarse_edge(unsigned bin) {
  const unsigned key = bin << 5;
  return __half2float(__ushort_as_half((unsigned short)(key ^ (key >> 15 ? 0x8000u : 0xffffu))));
}

// The sums over this thread's bins, from the top: thread t has kBins / kThreads of them.
struct FromTop {
  static constexpr int kOwn = kBins / kThreads;
  unsigned own[kOwn], before, sum;
  int top;

  __device__ __forceinline__ FromTop(const unsigned* histogram) {
    unsigned* parts = state().parts;
    top = kBins - 1 - (int)threadIdx.x * kOwn;
    sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i++) own[i] = histogram[top - i], sum += own[i];
    unsigned inclusive = sum;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const unsigned below = __shfl_up_sync(~0u, inclusive, lanes);
      if (lane >= lanes) inclusive += below;
    }
    if (lane == 31) parts[warp] = inclusive;
    __syncthreads();
    const unsigned part = lane < kWarps ? parts[lane] : 0;
    before = __reduce_add_sync(~0u, lane < warp ? part : 0) + inclusive - sum;
  }
};

// The bin in which the counts from the top reach `need`, and, for `deeper`, another. A bin of ~0
// where they don't.
__device__ __forceinline__ void find_bins_in(const unsigned* histogram, unsigned need, unsigned deeper) {
  if (threadIdx.x < 2) state().found[threadIdx.x] = Found{~0u, 0, 0};
  const FromTop mine(histogram);
  const unsigned needs[2] = {need, deeper};
#pragma unroll
  for (int n = 0; n < 2; n++) {
    if (mine.before < needs[n] && needs[n] <= mine.before + mine.sum) {
      unsigned above = mine.before;
#pragma unroll
      for (int i = 0; i < FromTop::kOwn; i++) {
        if (above < needs[n] && needs[n] <= above + mine.own[i]) {
          state().found[n] = Found{(unsigned)(mine.top - i), above, mine.own[i]};
        }
        above += mine.own[i];
      }
    }
  }
  __syncthreads();
}

// Of the first histogram.
__device__ __noinline__ void find_bins(unsigned need, unsigned deeper) { find_bins_in(histogram(), need, deeper); }

__device__ __forceinline__ void clear(unsigned* histogram) {
#pragma unroll
  for (int i = threadIdx.x; i < kBins; i += kThreads) histogram[i] = 0;
}

struct Keys {
  unsigned least, most;
};

// The least and the greatest key of the ranks from `floor` up. With a barrier.
__device__ __forceinline__ Keys key_range(List list, int n, u64 floor) {
  unsigned least = ~0u, most = 0;
#pragma unroll 4
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
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const u64 above = list[i] - low;
      if (above <= width) atomicAdd(&histogram()[above >> shift], 1);
    }
    __syncthreads();
    find_bins(need, 0);
    const Found found = state().found[0];
    need -= found.above;
    low += (u64)found.bin << shift;
    high = min(high, low + ((1ull << shift) - 1));
    if (found.count == need) return low;
    if (found.count <= kRanked) {
#pragma unroll 4
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

// Appends what reaches the cutoff of n vectors, the first of which lies in this column, until the list is
// over-full. How many were looked at.
template <class T, bool kHeld>
__device__ __forceinline__ int stream_vectors(const uint4* data, int n, int column, float cut, unsigned capacity,
                                              Vector<T> (&held)[kDepth]) {
  constexpr int kWidth = Vector<T>::kWidth;
  const auto load = [&](int j) {
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      if (j + d * kThreads < n) {
        const uint4 raw = __ldcg(data + j + d * kThreads);
        memcpy(&held[d], &raw, sizeof(raw));
      }
    }
  };
  int j = threadIdx.x;
  if constexpr (!kHeld) load(j);
#pragma unroll 1
  while (true) {
    unsigned hits = 0;
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      float most = widen(held[d].at[0]);
#pragma unroll
      for (int w = 1; w < kWidth; w++) most = fmaxf(most, widen(held[d].at[w]));
      if (most >= cut && j + d * kThreads < n) {
#pragma unroll
        for (int w = 0; w < kWidth; w++) hits |= (unsigned)(widen(held[d].at[w]) >= cut) << (d * kWidth + w);
      }
    }
    if (hits) {
      unsigned at = atomicAdd(&state().count, __popc(hits));
      if (at + __popc(hits) <= capacity) {
#pragma unroll
        for (int d = 0; d < kDepth; d++) {
          if (hits >> (d * kWidth) & ((1u << kWidth) - 1)) {
#pragma unroll
            for (int w = 0; w < kWidth; w++) {
              if (hits >> (d * kWidth + w) & 1) {
                own_list()[at++] = rank_of(key_of(widen(held[d].at[w])), column + (j + d * kThreads) * kWidth + w);
              }
            }
          }
        }
      }
    }
    j += kDepth * kThreads;
    const int base = j - (int)threadIdx.x;
    if (base >= n || *(volatile unsigned*)&state().count > capacity) return min(base, n);
    load(j);
  }
}

// By itself, with registers of its own.
template <class T>
__device__ __noinline__ int stream_all(const uint4* data, int n, int column, float cut, unsigned capacity) {
  Vector<T> held[kDepth];
  return stream_vectors<T, false>(data, n, column, cut, capacity, held);
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

  // f(score) for every sampled score; how many there are.
  template <class F>
  __device__ __forceinline__ unsigned for_each_sampled(F f) const {
    const int stride = request.stride;
    if (request.fixed_stride) {
      const int first = (int)((row * 17 + 13) & (stride - 1));
      const int n = first < scores.length ? (scores.length - 1 - first) / stride + 1 : 0;
#pragma unroll 4
      for (int i = threadIdx.x; i < n; i += kThreads) f(widen(scores.data[first + (long long)i * stride]));
      return n;
    }
    const int groups = scores.vectors / stride;
    constexpr int kLoads = 2;
#pragma unroll 1
    for (int base = threadIdx.x; base < groups; base += kLoads * kThreads) {
      Vector<T> v[kLoads];
#pragma unroll
      for (int d = 0; d < kLoads; d++) {
        const int group = base + d * kThreads;
        unsigned hash = group * 0x9e3779b1u + (unsigned)row * 0x85ebca6bu;
        hash = (hash ^ hash >> 15) * 0x2c1b3c6du;
        hash ^= hash >> 12;
        if (group < groups) v[d] = scores.load(group * stride + (hash & (stride - 1)));
      }
#pragma unroll
      for (int d = 0; d < kLoads; d++) {
        if (base + d * kThreads < groups) {
#pragma unroll
          for (int w = 0; w < kWidth; w++) f(widen(v[d].at[w]));
        }
      }
    }
    return groups * kWidth;
  }

  // The same from the vectors of a row that the block holds whole. About one score in `stride`, its place
  // in the vector a hash.
  template <class F>
  __device__ __forceinline__ unsigned for_each_held(const Vector<T> (&held)[kDepth], F f) const {
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
    return scores.vectors * kWidth / stride;
  }

  struct Proposal {
    // Keys; 0 where there is no number to cut at.
    unsigned primary, secondary;
  };

  // `sample` calls f for every sampled score and gives their number. The histogram is clear.
  template <class Sample>
  __device__ __forceinline__ Proposal propose(Sample sample) const {
    const unsigned sampled = sample([&](float x) { atomicAdd(&histogram()[coarse_bin(x)], 1); });
    if (threadIdx.x == 0) state().counters.read += sampled;
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
    __syncthreads();
    find_bins(need, deeper);
    const Found first = state().found[0], second = state().found[1];
    const bool exact = request.stride == 1;
    if (first.bin != ~0u && first.count * 4 >= sampled && !exact) {
      return propose_within(first, sampled, need, deeper);
    }
    Proposal proposal;
    proposal.primary = first.bin == ~0u ? 0 : cut_in(first, need, exact);
    proposal.secondary = second.bin == ~0u ? 0 : cut_in(second, deeper, exact);
    return proposal;
  }

  // The key at which a coarse bin is cut.
  __device__ __forceinline__ unsigned cut_in(const Found& found, unsigned need, bool whole) const {
    const float low = coarse_edge(found.bin), high = coarse_edge(found.bin + 1);
    if (found.bin <= 31 || !(high < CUDART_INF_F)) return found.bin <= 31 ? 0 : key_of(low);
    // Rounding takes values from a little below.
    if (whole) return key_of(low - (high - low) * (1.0f / 32));
    return key_of(high - (high - low) * __fdividef(need - found.above, found.count));
  }

  // Where a bin holds a quarter of the sample, its keys are looked at more closely.
  __device__ __noinline__ Proposal propose_within(Found first, unsigned sampled, unsigned need, unsigned deeper) const {
    Proposal proposal = {0, 0};
    if (first.bin <= 31) return proposal;
    const float edge = coarse_edge(first.bin), next = coarse_edge(first.bin + 1);
    // Rounding takes values from a little below.
    const unsigned low = key_of(next < CUDART_INF_F ? edge - (next - edge) * (1.0f / 32) : edge);
    const unsigned high = key_of(next < CUDART_INF_F ? next : CUDART_INF_F);
    const int shift = bin_shift((u64)(high - low));
    clear(histogram());
    __syncthreads();
    const unsigned again = for_each_sampled([&](float x) {
      const unsigned key = key_of(x);
      if (key >= low) atomicAdd(&histogram()[min((key - low) >> shift, kBins - 1)], 1);
    });
    if (threadIdx.x == 0) state().counters.read += again;
    __syncthreads();
    // This sample may be smaller.
    const float ratio = __fdividef(again, sampled);
    find_bins(max(1u, (unsigned)ceilf(need * ratio)),
              max(1u, (unsigned)ceilf(deeper * ratio)));
    const Found inner = state().found[0], deep = state().found[1];
    if (inner.bin != ~0u) proposal.primary = low + (inner.bin << shift);
    if (deep.bin != ~0u) proposal.secondary = low + (deep.bin << shift);
    return proposal;
  }

  // ---- Collection.

  __device__ __forceinline__ void load(Vector<T> (&v)[kDepth], const Slice& slice, int j) const {
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      if (j + d * kThreads < slice.end) v[d] = scores.load(j + d * kThreads);
    }
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

  // Appends what reaches the cutoff, a number, in no order; ends early once the list is over-full. Held
  // vectors are the first; others are loaded here. With a barrier.
  template <bool kHeld>
  __device__ __forceinline__ void stream(const Slice& slice, float cut, Vector<T> (&held)[kDepth]) const {
    ends(slice, [&](float x, int column) {
      if (x >= cut) append(atomicAdd(&state().count, 1), x, column);
    });
    const int n = slice.end - slice.begin, column = scores.column(slice.begin);
    const uint4* data = reinterpret_cast<const uint4*>(scores.data + scores.head) + slice.begin;
    int seen;
    if constexpr (kHeld) seen = stream_vectors<T, true>(data, n, column, cut, capacity(), held);
    else seen = stream_all<T>(data, n, column, cut, capacity());
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
  // barrier at the end. Whether the list is complete down to the cutoff or else has K.
  template <bool kHeld>
  __device__ __forceinline__ void collect_primary(const Slice& slice, unsigned primary, Vector<T> (&held)[kDepth]) const {
    if (primary <= kNegInfinityKey) {
      collect(slice, 0, kAllKeys);
      return;
    }
    stream<kHeld>(slice, value_of(primary), held);
    if (state().count > capacity()) {
      // Any K candidates bound the K-th best from below. The last to find no room had up to 32.
      const u64 threshold = compact(own_list(), capacity() - 32, k());
      if (threadIdx.x == 0) state().count = 0;
      __syncthreads();
      collect(slice, key_in(threshold), kAllKeys);
    }
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
    find_bins(need, 0);
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

  // The best of n candidates to the output. All threads have arrived, and see the list.
  __device__ __forceinline__ void finish(List list, int n, int route) const {
    u64 threshold = 0;
    if (n > (int)k()) threshold = refine(list, n, k());
    const unsigned count = min((unsigned)n, k());
    put_route(route);
    if (request.order != kUnordered) {
      put_ordered(list, n, threshold, count);
    } else {
      if (threadIdx.x == 0) state().kept = 0;
      __syncthreads();
      const int lane = threadIdx.x % 32;
#pragma unroll 2
      for (int base = 0; base < n; base += kThreads) {
        const int i = base + threadIdx.x;
        const u64 rank = i < n ? list[i] : 0;
        const bool keep = i < n && rank >= threshold;
        const unsigned keeps = __ballot_sync(~0u, keep);
        unsigned at = 0;
        if (lane == 0 && keeps) at = atomicAdd(&state().kept, __popc(keeps));
        at = __shfl_sync(~0u, at, 0) + __popc(keeps & ((1u << lane) - 1));
        if (keep) put(at, rank);
      }
    }
    put_rest(count);
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
    bool crowded = false;
    unsigned before = mine.before;
#pragma unroll
    for (int i = 0; i < FromTop::kOwn; i++) {
      offsets[mine.top - i] = before, before += mine.own[i];
      crowded |= mine.own[i] > kCrowd;
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
  const int each = (request.width + blocks - 1) / blocks;
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
