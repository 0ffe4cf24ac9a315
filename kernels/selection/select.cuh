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
//     memory. What does is few: each warp queues it, or the vectors that hold any, and appends as much as
//     it has lanes at a time. The list's length certifies the row: K or more hold the K best.
//  3. Refinement (4.4). The candidates, in registers, fill the leading histogram: bins of a few
//     each, of a width that the sample suggests. It says in which bin the K-th lies; the few in it
//     are ranked by comparing all pairs. Where they are many, a histogram over the range of ranks that
//     the list has, 11 bits of it at a time, narrows until they are few. Ties at rank K are decided
//     by the same integers, without a word to the row.
//
// A row that its block has in registers as a whole (short.cuh), or its cluster in shared memory (exact.cuh), needs
// neither sample nor list: the exact histogram of its coarse keys says what is selected, but for the bin of the K-th. One
// that a block by itself has in shared memory (held.cuh) is sampled, as counting all of it would take longer.
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
//
// What was tried, on an H200 (f32, K = 2048, raised ends; us):
//
//                                                             512 x 128K   1 x 128K   1 x 8K
//   1,024 threads, an atomic for each candidate                    159          -       13.6
//   512 threads, two blocks to a multiprocessor                     98         20       13.2
//   the leading histogram counted in the pass                      130       16.5       11.9
//   counted afterwards; a word a warp for 16 scores a lane;
//     short rows held; clusters that meet by messages               94       13.9        9.0
//   plain adds to histograms (not those of a constant 1, which
//     look for lanes of one bin); the output written side by side   94       12.6        7.9
//   the request and the selector out of local memory; queues        91       11.6        7.5
//   rows held by a cluster; short ones with fewer instructions      91       10.4        7.0
//   bins found by sums of all lanes, not first by warps              88          -          -
//
// Of rows by a block alone (128 x 128K, us): a queue of vectors 32.1; with four or eight vectors of a thread more on their
// way to shared memory 30.4 and 32.3, as what puts them there and takes them away costs instructions; a queue of positions
// 29.3.
//
// Short rows: 128 of 8K take 8.0 us. A kernel that does nothing takes 3.3 of them, in clusters or not. The last scores are
// there, and counted, 3,000 cycles after a block has begun, and 4,000 more go to steps each of which waits for the one before.
// Half of the threads with twice the scores take 8.5 us. Where each lane counts in bytes of its own, in a bank that no other
// has, it is 9.2: counting waits for the scores, and the bytes are to be summed. Bounds of rows that nothing waits for, and
// warps that write what they have by themselves, change nothing.
//
// Held rows: counting takes four cycles of a multiprocessor for each warp's atomic to shared memory, whether all its lanes
// count or few.
//
// A warp's integer and comparing instructions take two cycles each, so what every warp does costs the time of
// all: what is to be said once is looked at by the one warp that has it.
#pragma once

#include <math_constants.h>
#include <string.h>
#include <type_traits>

#include "../common/block.cuh"
#include "../common/order.cuh"
#include "../common/row.cuh"
#include "../common/warp.cuh"

typedef unsigned long long u64;

constexpr int kBins = 2048;
// Candidates beyond K that a list holds at least, and most that a block hands to another: `SLACK` in
// src/selection/plan.rs.
constexpr int kSlack = 4096;
// Frontiers up to here are ranked by comparing all pairs.
constexpr int kRanked = 256;
// Buckets up to here are ordered by comparing all pairs.
constexpr int kCrowd = 128;
// Candidates that a thread has in registers at the end, or twice as many.
constexpr int kEach = 8;
// Vectors that each thread has in flight, and as many again in a long pass.
constexpr int kDepth = 4;
// Vectors of the sample that each thread has in flight; a hash has a byte for each.
constexpr int kSampled = 2;
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

  // As it is, or `missing` where there is none: to be sent for early, and looked at late.
  __device__ __forceinline__ long long raw(long long row, int missing) const {
    if (kind == kNone) return missing;
    if (kind == kI64) return static_cast<const long long*>(at)[row * stride];
    // U32 from 2^31 up: a negative number that was stored as unsigned.
    return static_cast<const int*>(at)[row * stride];
  }
  static __device__ __forceinline__ int inside(long long raw, int width) {
    return (int)min(max(raw, 0ll), (long long)width);
  }
};

// `Request` in src/selection/cuda.rs.
//
// What is needed to send for a row comes first: parameters arrive by lines of 64 bytes, the first of which has 48 of them.
struct Request {
  const void* scores;
  long long pitch;
  int width, k;
  Bound start, end;
  unsigned* positions;
  float* values;      // or null
  unsigned* counts;
  unsigned* routes;   // or null: four counters a row
  unsigned* workspace;
  int capacity, stride;
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

// Dynamic shared memory: `shared_bytes` in src/selection/plan.rs. Two histograms, or the warps' queues, of vectors and their
// numbers from kNumbers on, or of positions; candidates from kLists on, and behind them the order of the selected.
constexpr int kVectors = 64;     // of a warp's queue
constexpr int kPositions = 320;  // or so many: what it had, and of all lanes eight
constexpr int kNumbers = kWarps * kVectors * sizeof(uint4);
constexpr int kLists = kNumbers + kWarps * kVectors * sizeof(int);
static_assert(kLists >= 2 * kBins * sizeof(unsigned) && kLists >= kWarps * kPositions * sizeof(int), "in one place");
__device__ __forceinline__ unsigned* histogram() { return reinterpret_cast<unsigned*>(dynamic); }
__device__ __forceinline__ unsigned* buckets() { return histogram() + kBins; }

__device__ __forceinline__ void count_in(unsigned* histogram, unsigned bin) { shared_count(histogram + bin); }

// Candidates from the one with this number on.
struct List {
  int first;
  __device__ __forceinline__ u64* at() const {
    return reinterpret_cast<u64*>(reinterpret_cast<char*>(dynamic) + kLists) + first;
  }
  __device__ __forceinline__ u64& operator[](int i) const { return at()[i]; }
};
__device__ __forceinline__ List own_list() { return List{0}; }

// Vectors j, j + step and so on of n > 0; the last, where there are fewer.
template <class T>
__device__ __forceinline__ void load_vectors(const uint4* data, int n, int j, int step, Vector<T> (&v)[kDepth]) {
#pragma unroll
  for (int d = 0; d < kDepth; d++) {
    // Not by way of L1, which has no use for it.
    const uint4 raw = __ldcg(data + min(j + d * step, n - 1));
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
    const uint4 raw = __ldcg(whole() + j);
    Vector<T> v;
    memcpy(&v, &raw, sizeof(v));
    return v;
  }
  __device__ __forceinline__ const uint4* whole() const { return reinterpret_cast<const uint4*>(data + head); }
  // Column of the first element of vector j.
  __device__ __forceinline__ int column(int j) const { return start + head + j * kWidth; }
};

// Of a power of two.
__device__ __forceinline__ int log_of(int x) { return 31 - __clz(x); }

// A block's part of a row's vectors: of every `blocks` times 32 of them 32 to each of its warps, so that
// blocks have alike of whatever the row holds, and what lies close by in memory is read at once. `first` is
// this thread's first one, each `step` after the one before.
struct Slice {
  int first, step, end;
  int rank, blocks;

  __device__ __forceinline__ Slice(int rank, int blocks, int vectors)
      : first(((int)threadIdx.x / 32 * blocks + rank) * 32 + (int)threadIdx.x % 32),
        step(kThreads * blocks),
        end(vectors),
        rank(rank),
        blocks(blocks) {}
  // The few scores before the first vector and after the last.
  __device__ __forceinline__ bool has_ends() const { return rank == 0; }
  // How many scores it has, about; exact for all together.
  template <class T>
  __device__ __forceinline__ unsigned scores(const Scores<T>& s) const {
    return ((end + rank) >> log_of(blocks)) * Scores<T>::kWidth + (has_ends() ? s.head + s.tail() : 0);
  }
  // f(number of this thread's next vector) for every tile of the block, alike in all threads.
  template <class F>
  __device__ __forceinline__ void for_each_tile(F f) const {
#pragma unroll 1
    for (int base = 0; base < end; base += kDepth * step) f(base + first);
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

// Coarse keys are the upper 11 bits of FP16 keys: sign, exponent and five bits of the fraction.

// The FP16 keys of two scores, one in each half: ascending. NaN has that of -inf, in bin 31, and -0 that of +0, so
// of two scores the greater has no lower one.
__device__ __forceinline__ unsigned coarse_keys(__half2 pair) {
  pair = __hadd2(__hmax2(pair, __half2half2(__ushort_as_half(0xfc00))), __half2half2(__ushort_as_half(0)));
  unsigned bits;
  memcpy(&bits, &pair, sizeof(bits));
  const unsigned negative = bits >> 15 & 0x00010001u;
  return bits ^ negative * 0x7fff ^ 0x80008000u;
}
__device__ __forceinline__ __half2 half_pair(float a, float b) { return __floats2half2_rn(a, b); }
__device__ __forceinline__ __half2 half_pair(__half a, __half b) { return __halves2half2(a, b); }
__device__ __forceinline__ __half2 half_pair(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __floats2half2_rn(__bfloat162float(a), __bfloat162float(b));
}
// The value with this FP16 key, of which a coarse bin has 32.
__device__ __forceinline__ float coarse_value(unsigned key) {
  return __half2float(__ushort_as_half((unsigned short)(key ^ (key >> 15 ? 0x8000u : 0xffffu))));
}

// The sum over the threads before this one. A barrier comes before the next call; with one.
__device__ __forceinline__ unsigned sum_before(unsigned mine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned inclusive = inclusive_sum(mine);
  if (lane == 31) state().parts[warp] = inclusive;
  __syncthreads();
  return __reduce_add_sync(~0u, lane < warp ? state().parts[lane] : 0) + inclusive - mine;
}

// This thread's bins, from the top: four of them.
struct FromTop {
  static constexpr int kOwn = kBins / kThreads;
  static_assert(kOwn == 4, "a vector a thread");
  unsigned own[kOwn], sum;
  int top;

  __device__ __forceinline__ explicit FromTop(const unsigned* histogram) {
    top = kBins - 1 - (int)threadIdx.x * kOwn;
    const uint4 four = *reinterpret_cast<const uint4*>(histogram + top - 3);
    own[0] = four.w, own[1] = four.z, own[2] = four.y, own[3] = four.x;
    sum = four.x + four.y + four.z + four.w;
  }
};

// The bin of a histogram, 0 or 1, in which the counts from the top reach `need`, and, unless it is 0, `deeper`.
// A bin of ~0 where they don't. With a barrier at the end. By sums of all lanes: where warps first say how much they have, and
// the one that has it looks closer, it takes 1,900 cycles, and 600 this way.
__device__ __noinline__ void find_bins(int which, unsigned need, unsigned deeper) {
  if (threadIdx.x < 2) state().found[threadIdx.x] = Found{~0u, 0, 0};
  const FromTop mine(histogram() + which * kBins);
  const unsigned before = sum_before(mine.sum);
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const unsigned reach = (n ? deeper : need) - before;
    // One thread has it.
    if (reach - 1 < mine.sum) {
      unsigned above = 0, bin = mine.top, count = mine.own[0];
#pragma unroll
      for (int i = 1; i < FromTop::kOwn; i++) {
        if (reach > above + count) above += count, bin = mine.top - i, count = mine.own[i];
      }
      state().found[n] = Found{bin, before + above, count};
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

// The least and the greatest of a word of the ranks that `take` names. With a barrier.
template <class Take, class Word>
__device__ __forceinline__ Keys word_range(List list, int n, Take take, Word word) {
  unsigned least = ~0u, most = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const u64 rank = list[i];
    if (take(rank)) least = min(least, word(rank)), most = max(most, word(rank));
  }
  least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) state().low[warp] = least, state().high[warp] = most;
  __syncthreads();
  return {__reduce_min_sync(~0u, lane < kWarps ? state().low[lane] : ~0u),
          __reduce_max_sync(~0u, lane < kWarps ? state().high[lane] : 0)};
}
// Of the keys of the ranks from `floor` up.
__device__ __forceinline__ Keys key_range(List list, int n, u64 floor) {
  return word_range(list, n, [&](u64 rank) { return rank >= floor; }, key_in);
}

// The rank of the `need`-th best of n > 0 candidates, need at most n. All threads have arrived, and
// see the list.
__device__ __noinline__ u64 refine(List list, int n, unsigned need) {
  clear(histogram());
  if (threadIdx.x == 0) state().slots = 0;
  const Keys keys = key_range(list, n, 0);
  u64 low = (u64)keys.least << 32, high = (u64)keys.most << 32 | ~0u;
  while (true) {
    if (low >> 32 == high >> 32 && (unsigned)low == 0 && (unsigned)high == ~0u) {
      // Ties: what is left differs in its positions alone, which have few of their word's bits.
      __syncthreads();
      const Keys positions = word_range(
          list, n, [&](u64 rank) { return rank >> 32 == low >> 32; }, [](u64 rank) { return (unsigned)rank; });
      low |= positions.least, high = (high ^ ~0u) | positions.most;
    }
    const u64 width = high - low;
    // Whole keys, or positions of one.
    const int shift = width >> 32 ? max(bin_shift(width), 32) : bin_shift(width);
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const u64 above = list[i] - low;
      if (above <= width) count_in(histogram(), above >> shift);
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
// Score i of one vector, or of kCount.
template <class T, int kCount>
__device__ __forceinline__ float pick(const Vector<T> (&v)[kCount], int i) {
  constexpr int kPerWord = 4 / sizeof(T);
  unsigned words[4 * kCount];
#pragma unroll
  for (int d = 0; d < kCount; d++) memcpy(words + 4 * d, &v[d], 16);
  const unsigned word = pick_word<4 * kCount>(words, i / kPerWord);
  if constexpr (kPerWord == 1) return __uint_as_float(word);
  else return widen(from_bits<T>(i & 1 ? word >> 16 : word & 0xffff));
}
__device__ __forceinline__ u64 pick_rank(const u64* ranks, int i, int n) {
  u64 rank = ranks[0];
#pragma unroll
  for (int e = 1; e < n; e++) rank = i == e ? ranks[e] : rank;
  return rank;
}

// Appending what reaches the cutoff of those of n > 0 vectors that a warp has: its first, each `step` after the one
// before, from the one with number `turn` on, around the row's end. Few scores do, so a warp queues these, and appends as
// many as it has lanes at a time. Ends early once the list is over-full.
template <class T>
struct Pass {
  static constexpr int kWidth = Vector<T>::kWidth;
  const uint4* data;
  const T* row;  // at column 0
  int n, step, turn;
  int column;  // of the first vector
  float cut;
  unsigned capacity;

  __device__ __forceinline__ int turned(int j) const { return (int)min((unsigned)(j + turn), (unsigned)(j + turn - n)); }
  __device__ __forceinline__ void load(int j, Vector<T> (&v)[kDepth]) const {
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      // Not by way of L1, which has no use for it. Beyond the end it is the last vector, over and over: cheaper to load
      // than not to.
      const uint4 raw = __ldcg(data + turned(min(j + d * step, n - 1)));
      memcpy(&v[d], &raw, sizeof(raw));
    }
  }
};

// ---- By a queue of vectors that hold any. Where two blocks share a multiprocessor, what one waits for the other hides, and
// nothing is to be read twice: 512 rows of 128K take 93 us by this, and 97 by positions.

// Whether the greatest of a vector, NaN aside, reaches the cutoff.
__device__ __forceinline__ bool reaches(const Vector<float>& v, float cut) {
  return fmaxf(fmaxf(v.at[0], v.at[1]), fmaxf(v.at[2], v.at[3])) >= cut;
}
template <class Pair, class T>
__device__ __forceinline__ bool any_of_pairs(const Vector<T>& v, float cut) {
  Pair pairs[4];
  memcpy(pairs, &v, sizeof(v));
  const Pair most = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return widen(most.x) >= cut || widen(most.y) >= cut;
}
__device__ __forceinline__ bool reaches(const Vector<__half>& v, float cut) { return any_of_pairs<__half2>(v, cut); }
__device__ __forceinline__ bool reaches(const Vector<__nv_bfloat16>& v, float cut) {
  return any_of_pairs<__nv_bfloat162>(v, cut);
}

// A warp's queue.
__device__ __forceinline__ uint4* queued_vectors() { return dynamic + threadIdx.x / 32 * kVectors; }
__device__ __forceinline__ int* queued_numbers() {
  return reinterpret_cast<int*>(reinterpret_cast<char*>(dynamic) + kNumbers) + threadIdx.x / 32 * kVectors;
}

// Appends what reaches the cutoff of up to 32 queued vectors, one a lane. Whether there was room. Not inlined:
// with registers of its own, and once in the code.
template <class T>
__device__ __noinline__ bool append_vectors(int from, int n, float cut, int column, unsigned capacity) {
  constexpr int kWidth = Vector<T>::kWidth;
  const int lane = threadIdx.x % 32;
  __syncwarp();
  Vector<T> v[1];
  unsigned hits = 0;
  if (lane < n) {
    memcpy(&v[0], queued_vectors() + from + lane, sizeof(uint4));
    column += queued_numbers()[from + lane] * kWidth;
#pragma unroll
    for (int w = 0; w < kWidth; w++) hits |= (unsigned)(widen(v[0].at[w]) >= cut) << w;
  }
  const unsigned mine = __popc(hits), inclusive = inclusive_sum(mine);
  unsigned end = 0;
  if (lane == 31) end = shared_add(&state().count, inclusive);
  end = __shfl_sync(~0u, end, 31) + inclusive;
  if (__any_sync(~0u, end > capacity)) return false;
  int at = end - mine;
#pragma unroll 1
  while (hits) {
    const int i = __ffs(hits) - 1;
    hits &= hits - 1;
    own_list()[at++] = rank_of(key_of_number(pick(v, i)), column + i);
  }
  return true;
}

template <class T>
struct VectorStream : Pass<T> {
  using Pass<T>::kWidth, Pass<T>::n, Pass<T>::step, Pass<T>::column, Pass<T>::cut, Pass<T>::capacity;
  using Pass<T>::turned, Pass<T>::load;

  // Queues; whether there was room in the list.
  __device__ __forceinline__ bool look_at(const Vector<T> (&v)[kDepth], int j, int* queued) const {
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      // Beyond the end it is the last vector, over and over: cheaper to load than not to.
      const bool mine = reaches(v[d], cut) && j + d * step < n;
      const unsigned vote = __ballot_sync(~0u, mine);
      if (vote) {
        if (mine) {
          const int at = *queued + __popc(vote & ((1u << threadIdx.x % 32) - 1));
          memcpy(queued_vectors() + at, &v[d], sizeof(uint4));
          queued_numbers()[at] = turned(j + d * step);
        }
        *queued += __popc(vote);
        if (*queued >= 32) {
          *queued -= 32;
          if (!append_vectors<T>(*queued, 32, cut, column, capacity)) return false;
        }
      }
    }
    return true;
  }

  // `first` is this thread's first vector, and `held` are its first ones.
  __device__ __forceinline__ void run(int first, Vector<T> (&held)[kDepth]) const {
    const int lane = threadIdx.x % 32;
    int j = first, queued = 0;
    Vector<T> next[kDepth];
    load(j + kDepth * step, next);
    // Two at a time, so that none needs to be moved.
#pragma unroll 1
    while (true) {
      if (!look_at(held, j, &queued)) return;
      j += kDepth * step;
      if (j - lane >= n) break;
      load(j + kDepth * step, held);
      if (!look_at(next, j, &queued)) return;
      j += kDepth * step;
      if (j - lane >= n) break;
      load(j + kDepth * step, next);
    }
    if (queued) append_vectors<T>(0, queued, cut, column, capacity);
  }
};

// ---- By a queue of positions. Of each score it takes two instructions, of one cycle and of two; what is found is read
// again, from nearby. A block alone on its multiprocessor, with half the warps, is kept busy by the instructions of the
// other kind: 128 rows of 256K take 49 us by that, and 45 by this.

// Which of a thread's vectors are above: of what a word has bits for.
template <class T>
struct Hits {
  static constexpr int kWidth = Vector<T>::kWidth;
  static constexpr int kTiles = sizeof(T) == 4 ? 2 : 1;  // in a word
  unsigned word = 0;

  // The next tile's: one instruction that takes two cycles a score, or a pair of them.
  __device__ __forceinline__ void look_at(const Vector<T> (&v)[kDepth], T below) {
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int w = 0; w < kWidth; w++) word = __funnelshift_l(sign_above(below, v[d].at[w]), word, 1);
      } else {
        typedef decltype(pair(T(), T())) Pair;
        Pair pairs[kWidth / 2];
        memcpy(pairs, &v[d], sizeof(pairs));
#pragma unroll
        for (int w = 0; w < kWidth / 2; w++) {
          word = word >> 1 | (signs_above(pair(below, below), pairs[w]) & 0x80008000u);
        }
      }
    }
  }
  // The score of a bit: the number of its vector, of those of the word's tiles, and the place in it.
  static __device__ __forceinline__ int number_of(int bit) {
    return sizeof(T) == 4 ? 31 - bit : bit % 16 * 2 + bit / 16;
  }
  // Takes away those of all but the first n > 0 vectors.
  __device__ __forceinline__ void only(int n) {
    if constexpr (sizeof(T) == 4) word &= ~0u << (32 - 4 * n);
    else word &= 0x00010001u * ((1u << 4 * n) - 1);
  }
};

// A warp's queue: positions of scores that reach the cutoff. In the place of histograms, and behind them.
__device__ __forceinline__ int* queue() { return reinterpret_cast<int*>(dynamic) + threadIdx.x / 32 * kPositions; }

// Appends so many of the queue, at most kAtOnce a lane: they are near by still, and are asked for together. Not inlined: with
// registers of its own, and once in the code. False where there is no room.
constexpr int kAtOnce = 4;
template <class T>
__device__ __noinline__ bool append_positions(const T* row, int from, int n, unsigned capacity) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
  int columns[kAtOnce];
  T scores[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    if (i * 32 + lane < n) columns[i] = queue()[from + i * 32 + lane], scores[i] = __ldcg(row + columns[i]);
  }
  unsigned at = 0;
  if (lane == 0) at = shared_add(&state().count, n);
  at = __shfl_sync(~0u, at, 0);
  if (at + n > capacity) return false;
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    if (i * 32 + lane < n) own_list()[at + i * 32 + lane] = rank_of(key_of_number(widen(scores[i])), columns[i]);
  }
  __syncwarp();
  return true;
}

template <class T>
struct PositionStream : Pass<T> {
  using Pass<T>::kWidth, Pass<T>::row, Pass<T>::n, Pass<T>::step, Pass<T>::column, Pass<T>::capacity;
  using Pass<T>::turned, Pass<T>::load;

  // Queues and appends the hits of this lane, of the tiles from vector j on; whether there was room in the list.
  __device__ __forceinline__ bool take(Hits<T> hits, int j, int* queued) const {
    constexpr int kVectors = Hits<T>::kTiles * kDepth;
    if (j + (kVectors - 1) * step >= n) {
      const int inside = max(0, (n - j + step - 1) / step);
      if (inside == 0) hits.word = 0;
      else if (inside < kVectors) hits.only(inside);
    }
    if (!__any_sync(~0u, hits.word)) return true;
    // As many at a time as the queue has room for: nearly always all.
    unsigned parts = ~0u;
    unsigned inclusive = inclusive_sum(__popc(hits.word));
    if (__shfl_sync(~0u, inclusive, 31) > kPositions - 32) {
      parts = 0xff;
      inclusive = inclusive_sum(__popc(hits.word & parts));
    }
#pragma unroll 1
    while (true) {
      unsigned part = hits.word & parts;
      int at = *queued + inclusive - __popc(part);
#pragma unroll 1
      while (part) {
        const int bit = __ffs(part) - 1;
        part &= part - 1;
        const int number = Hits<T>::number_of(bit);
        queue()[at++] = column + turned(j + number / kWidth * step) * kWidth + number % kWidth;
      }
      *queued += __shfl_sync(~0u, inclusive, 31);
#pragma unroll 1
      while (*queued >= 32) {
        const int n = min(*queued & ~31, 32 * kAtOnce);
        *queued -= n;
        if (!append_positions(row, *queued, n, capacity)) return false;
      }
      if (parts >> 31) return true;
      parts <<= 8;
      inclusive = inclusive_sum(__popc(hits.word & parts));
    }
  }

  // `first` is this thread's first vector, and `held` are its first ones.
  __device__ __forceinline__ void run(int first, Vector<T> (&held)[kDepth]) const {
    const int lane = threadIdx.x % 32, tile = kDepth * step;
    const T below = below_of<T>(Pass<T>::cut);
    int j = first, queued = 0;
    Vector<T> next[kDepth];
    load(j + tile, next);
    // Two at a time, so that none needs to be moved.
#pragma unroll 1
    for (; j - lane < n; j += 2 * tile) {
      Hits<T> hits;
      hits.look_at(held, below);
      load(j + 2 * tile, held);
      if constexpr (Hits<T>::kTiles == 1) {
        if (!take(hits, j, &queued)) return;
        if (j + tile - lane >= n) break;
        hits = Hits<T>();
      }
      hits.look_at(next, below);
      load(j + 3 * tile, next);
      if (!take(hits, Hits<T>::kTiles == 1 ? j + tile : j, &queued)) return;
    }
    if (queued) append_positions(row, 0, queued, capacity);
  }
};

// By itself, with registers of its own.
template <class T>
__device__ __noinline__ void run_alone(const VectorStream<T> stream, int first) {
  Vector<T> held[kDepth];
  stream.load(first, held);
  stream.run(first, held);
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

  // The same with a request of its own.
  __device__ __forceinline__ Selector(const Request& request, const Selector& other)
      : request(request), scores(other.scores), row(other.row), lists(other.lists) {}

  // What a function that is not inlined is called on: a copy. One whose address such a function has been told
  // would lie in local memory, and be read from there, and the request by way of it, wherever it is used.
  __device__ __forceinline__ Selector apart() const { return *this; }

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

  // Of the jittered view two neighbours at a time: memory gives no less than both.
  __device__ __forceinline__ int groups() const { return scores.vectors >> log_of(request.stride) & ~1; }
  // The sampled vectors of this thread's next groups, from `group` on.
  __device__ __forceinline__ void load_sampled(Vector<T> (&v)[kSampled], int group) const {
    const int stride = request.stride, n = groups();
    unsigned hash = (group >> 1) * 0x9e3779b1u + (unsigned)row * 0x85ebca6bu;
    hash = (hash ^ hash >> 15) * 0x2c1b3c6du;
    hash ^= hash >> 12;
    const uint4* first = scores.whole() + ((group >> 1) * stride * 2 + (group & 1));
#pragma unroll
    for (int d = 0; d < kSampled; d++) {
      const int place = (hash >> (8 * d) & (stride - 1)) * 2;
      if (group + d * kThreads < n) {
        const uint4 raw = __ldcg(first + (place + d * kThreads * stride));
        memcpy(&v[d], &raw, sizeof(raw));
      }
    }
  }

  // two(a score, another) or one(score) for all sampled scores, of which the jittered view's first are there.
  template <class Two, class One>
  __device__ __forceinline__ void for_each_sampled(Vector<T> (&v)[kSampled], Two two, One one) const {
    if (request.fixed_stride) {
      const int n = sample_size();
#pragma unroll 2
      for (int i = threadIdx.x; i < n; i += kThreads) one(scores.data[view_start() + (long long)i * request.stride]);
      return;
    }
#pragma unroll 1
    for (int group = threadIdx.x; group < groups(); group += kSampled * kThreads) {
      Vector<T> next[kSampled];
      load_sampled(next, group + kSampled * kThreads);
#pragma unroll
      for (int d = 0; d < kSampled; d++) {
        if (group + d * kThreads < groups()) {
#pragma unroll
          for (int w = 0; w < kWidth; w += 2) two(v[d].at[w], v[d].at[w + 1]);
        }
        v[d] = next[d];
      }
    }
  }

  struct Proposal {
    // A key; 0 where there is no number to cut at.
    unsigned primary;
    // Where the secondary cutoff lies: a key, or its bin and how much of the sample it is to hold.
    Found second;
    unsigned secondary, deeper;
    Leading leading;
  };

  // From the sample, whose first are there. The histogram is clear.
  __device__ __forceinline__ Proposal propose(Vector<T> (&first_sampled)[kSampled]) const {
    const unsigned sampled = sample_size();
    // Approximate operations will do, alike in all blocks of a row.
    const float fraction = __fdividef(sampled, scores.length);
    const float expected = fraction * k();
    const float variance = expected * (1.0f - fraction);
    const float deviation = variance * rsqrtf(fmaxf(variance, 1e-20f));
    float aim = request.margin * expected;
    if (request.margin == 0.0f) {
      aim = expected;
      if (fraction < 1.0f) aim += request.deviations * deviation + 0.25f * request.deviations * request.deviations;
    }
    const unsigned need = max(1u, (unsigned)ceilf(aim));
    const unsigned deeper = max(need + 1, (unsigned)ceilf(aim + 3.0f * deviation + 2.0f));
    for_each_sampled(
        first_sampled,
        [&](T a, T b) {
          const unsigned both = coarse_keys(half_pair(a, b));
          count_in(histogram(), (both & 0xffff) >> 5);
          count_in(histogram(), both >> 21);
        },
        [&](T x) { count_in(histogram(), coarse_keys(half_pair(x, x)) >> 21); });
    if (threadIdx.x == 0) state().counters.read += sampled;
    __syncthreads();
    find_bins(0, need, deeper);
    const Found first = state().found[0], second = state().found[1];
    if (first.bin != ~0u && first.count * 4 >= sampled && request.stride > 1) {
      return apart().propose_within(first, need, deeper);
    }
    Proposal proposal;
    proposal.primary = cut_in(first, need);
    proposal.second = second, proposal.secondary = 0, proposal.deeper = deeper;
    proposal.leading = leading_from(proposal.primary, 18, __fdividef(first.count, fraction));
    return proposal;
  }

  __device__ __forceinline__ unsigned secondary_of(const Proposal& proposal) const {
    return max(proposal.secondary, cut_in(proposal.second, proposal.deeper));
  }

  // The key at which a coarse bin is cut.
  __device__ __forceinline__ unsigned cut_in(const Found& found, unsigned need) const {
    // What is no number lies in -inf's bin, or in none.
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
  __device__ __noinline__ Proposal propose_within(Found first, unsigned need, unsigned deeper) const {
    Proposal proposal = {0, {~0u, 0, 0}, 0, 0, {0, 0}};
    if (first.bin <= 31) return proposal;
    const unsigned low = key_of(coarse_value((first.bin << 5) - 1));
    const unsigned high = key_of(coarse_value(min((first.bin + 1) << 5, 0xfc00)));
    const int shift = bin_shift((u64)(high - low));
    clear(histogram());
    __syncthreads();
    Vector<T> v[kSampled];
    if (!request.fixed_stride) load_sampled(v, threadIdx.x);
    const auto one = [&](T x) {
      const unsigned key = key_of(widen(x));
      if (key >= low) count_in(histogram(), min((key - low) >> shift, kBins - 1));
    };
    for_each_sampled(v, [&](T a, T b) { one(a), one(b); }, one);
    const unsigned sampled = sample_size();
    if (threadIdx.x == 0) state().counters.read += sampled;
    __syncthreads();
    find_bins(0, need, deeper);
    const Found inner = state().found[0], deep = state().found[1];
    if (inner.bin != ~0u) proposal.primary = low + (inner.bin << shift);
    if (deep.bin != ~0u) proposal.secondary = low + (deep.bin << shift);
    proposal.leading = leading_from(proposal.primary, shift, __fdividef((float)inner.count * scores.length, sampled));
    return proposal;
  }

  // ---- Collection.

  // The vectors j and so on of a slice that has any.
  __device__ __forceinline__ void load(Vector<T> (&v)[kDepth], const Slice& slice, int j) const {
    if (slice.end > 0) load_vectors(scores.whole(), slice.end, j, slice.step, v);
  }

  // f(score, column) for the few scores before the first vector and after the last.
  template <class F>
  __device__ __forceinline__ void ends(const Slice& slice, F f) const {
    const int i = threadIdx.x;
    if (!slice.has_ends()) return;
    if (i < scores.head) f(widen(scores.data[i]), scores.start + i);
    const int tail = i - 32;
    if (tail >= 0 && tail < scores.tail()) {
      const int at = scores.length - scores.tail() + tail;
      f(widen(scores.data[at]), scores.start + at);
    }
  }

  __device__ __forceinline__ void append(unsigned at, float x, int column) const {
    if (at < capacity()) own_list()[at] = rank_of(key_of(x), column);
  }

  // Appends what reaches the cutoff, a number, in no order; ends early once the list is over-full. With
  // kHeld the slice's first vectors are there. With a barrier.
  template <bool kHeld>
  __device__ __forceinline__ void stream(const Slice& slice, float cut, Vector<T> (&held)[kDepth]) const {
    ends(slice, [&](float x, int column) {
      if (x >= cut) append(atomicAdd(&state().count, 1), x, column);
    });
    // Rows that lie some power of two apart, and are read in step, would all want the same of memory's channels.
    // Only of a block alone: others, which may collect anew, by themselves, must not have its part then.
    const bool turns = !kHeld && slice.blocks == 1 && slice.end > 0;
    const int turn = turns ? (int)row * (5 * kDepth * kThreads) & ((1 << log_of(slice.end)) - 1) : 0;
    const Pass<T> pass = {scores.whole(),   scores.data - scores.start, slice.end, slice.step, turn,
                          scores.column(0), cut,                        capacity()};
    // The queues lie where the sample's histogram was, which all have read, and where the leading one is to be.
    // Whole warps: all of one vote.
    if (slice.first - (int)threadIdx.x % 32 < slice.end) {
      if constexpr (kHeld) PositionStream<T>{pass}.run(slice.first, held);
      else run_alone(VectorStream<T>{pass}, slice.first);
    }
    __syncthreads();
    clear(buckets());
    __syncthreads();
    if (threadIdx.x == 0) {
      state().counters.read += slice.scores(scores);
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
  __device__ __noinline__ void collect(Slice slice, unsigned low, unsigned high) const {
    const Request own = request;
    Selector(own, *this).collect_tiles(slice, low, high);
  }
  __device__ __forceinline__ void collect_tiles(const Slice& slice, unsigned low, unsigned high) const {
    const unsigned before = state().count;
    __syncthreads();
    unsigned keys[kWidth];
    // The head and the tail are chunks of single scores.
    const auto single = [&](bool mine, int at) {
#pragma unroll
      for (int w = 0; w < kWidth; w++) keys[w] = 0;
      if (mine) keys[0] = key_of(widen(scores.data[at]));
      apart().append_chunk(keys, mine, scores.start + at, &low, high);
    };
    if (slice.has_ends() && scores.head) single((int)threadIdx.x < scores.head, threadIdx.x);
    slice.for_each_tile([&](int j) {
      Vector<T> v[kDepth];
      load(v, slice, j);
      unsigned all = 0;
      bool over = false;
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        if (j + d * slice.step < slice.end) {
#pragma unroll
          for (int w = 0; w < kWidth; w++) keys[w] = key_of(widen(v[d].at[w]));
          unsigned appended;
          over |= append_keys(keys, in_range(keys, ~0u, low, high), scores.column(j + d * slice.step), &appended);
          all += appended;
        }
      }
      if (__syncthreads_or(over)) {
        if (all) atomicSub(&state().count, all);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < kDepth; d++) {
          const bool mine = j + d * slice.step < slice.end;
#pragma unroll
          for (int w = 0; w < kWidth; w++) keys[w] = mine ? key_of(widen(v[d].at[w])) : 0;
          apart().append_chunk(keys, mine ? ~0u : 0, scores.column(j + d * slice.step), &low, high);
        }
      }
    });
    if (slice.has_ends() && scores.tail()) {
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
  // barrier at the end.
  template <bool kHeld>
  __device__ __forceinline__ void collect_primary(const Slice& slice, const Proposal& proposal,
                                                  Vector<T> (&held)[kDepth]) const {
    if (proposal.primary <= kNegInfinityKey) return apart().collect(slice, 0, kAllKeys);
    stream<kHeld>(slice, value_of(proposal.primary), held);
    if (state().count <= capacity()) return;
    apart().collect_raised(slice);
  }

  // The same after the list was over-full.
  __device__ __noinline__ void collect_raised(Slice slice) const {
    // Any K candidates bound the K-th best from below. The first to find no room had so many.
    static_assert(kWarps * 32 * kAtOnce < kSlack, "more than K");
    const u64 threshold = compact(own_list(), capacity() - kWarps * 32 * kAtOnce, k());
    if (threadIdx.x == 0) state().count = 0;
    __syncthreads();
    collect(slice, key_in(threshold), kAllKeys);
  }

  // Counts the leading bits of the keys below `high`. With a barrier at the end.
  __device__ __noinline__ void count_leading(Slice slice, unsigned high) const {
    clear(histogram());
    __syncthreads();
    const auto count = [&](float x, int) {
      const unsigned key = key_of(x);
      if (key < high) count_in(histogram(), key >> 21);
    };
    ends(slice, count);
    slice.for_each_tile([&](int j) {
      Vector<T> v[kDepth];
      load(v, slice, j);
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        if (j + d * slice.step < slice.end) {
#pragma unroll
          for (int w = 0; w < kWidth; w++) count(widen(v[d].at[w]), 0);
        }
      }
    });
    if (threadIdx.x == 0) state().counters.read += slice.scores(scores);
    __syncthreads();
  }

  // The row's K best or more, after the pass down to the primary cutoff found fewer, all of them in
  // the list. How many are in the list then is the same for all that call.
  __device__ __noinline__ int recover(Slice slice, Proposal proposal) const {
    unsigned low = proposal.primary;
    int route = kPrimary;
    const unsigned secondary = secondary_of(proposal);
    if (request.band && secondary < low) {
      route = kBand;
      collect(slice, secondary, low);
      low = secondary;
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
  // bins for keys that are all at least its `low`; their histogram is clear.
  __device__ __forceinline__ void finish(List list, int n, int route, Leading leading) const {
    put_route(route);
    const unsigned count = min((unsigned)n, k());
    if (n <= (int)k() || route != kPrimary) {
      apart().finish_any(list, n, count);
    } else {
      finish_primary(list, n, leading);
    }
    put_rest(count);
  }

  __device__ __noinline__ void finish_any(List list, int n, unsigned count) const {
    const Request own = request;
    const Selector self(own, *this);
    if (own.order != kUnordered) {
      if (n > (int)count) compact(list, n, count);
      return self.put_sorted(list, count);
    }
    const u64 threshold = n > (int)count ? refine(list, n, count) : 0;
    self.put_unordered(list, n, 0, [&](u64 rank) { return rank >= threshold; });
  }

  // The candidates that `keep` names, after the first ones, by one word a warp to the others.
  template <class Keep>
  __device__ __forceinline__ void put_unordered(List list, int n, unsigned first, Keep keep) const {
    if (threadIdx.x == 0) state().kept = first;
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

  // More than K candidates in any order.
  __device__ __forceinline__ void finish_primary(List list, int n, Leading leading) const {
    bool put;
    if (n <= kEach * kThreads) put = put_from<kEach>(list, n, leading);
    else put = put_from<2 * kEach>(list, n, leading);
    if (!put) apart().finish_any(list, n, k());
  }
  template <int kMost>
  __device__ __forceinline__ bool put_from(List list, int n, Leading leading) const {
    u64 mine[kMost];
#pragma unroll
    for (int e = 0; e < kMost; e++) {
      const int i = threadIdx.x + e * kThreads;
      mine[e] = i < n ? list[i] : 0;
    }
    return put_leading(mine, leading);
  }

  // The best of more than K candidates, in any order: by their leading histogram those in the bins above that
  // of the K-th, and of its bin those that all pairs say. They lie in registers, 0 where there is none. False
  // and nothing done where too many share the bin. The histogram is clear.
  template <int kMost>
  __device__ __forceinline__ bool put_leading(const u64 (&mine)[kMost], Leading leading) const {
    static_assert(2 * kEach * kThreads >= 2 * kSlack, "all that fits in a list");
#pragma unroll
    for (int e = 0; e < kMost; e++) {
      const unsigned key = key_in(mine[e]);
      if (key >= leading.low) count_in(buckets(), leading.bin(key));
    }
    if (threadIdx.x == 0) state().kept = 0, state().slots = 0;
    __syncthreads();
    find_bins(1, k(), 0);
    const Found found = state().found[0];
    // In the last bin is what is beyond it, too.
    if (found.count > kRanked || found.bin == kBins - 1) return false;
    const unsigned low = leading.low + (found.bin << leading.shift), high = low + (1u << leading.shift);
    // Loops without branches, and one over what is rare.
    unsigned above = 0, bin = 0;
#pragma unroll
    for (int e = 0; e < kMost; e++) {
      above += key_in(mine[e]) >= high;
      bin |= (unsigned)(key_in(mine[e]) - low < high - low) << e;
    }
    const unsigned first = places(above);
    const auto each = [&](auto f) {
      unsigned at = first;
#pragma unroll
      for (int e = 0; e < kMost; e++) {
        if (key_in(mine[e]) >= high) f(at++, mine[e]);
      }
    };
    const bool ordered = request.order != kUnordered;
    if (ordered) each([](unsigned at, u64 rank) { own_list()[at] = rank; });
    else each([](unsigned at, u64 rank) { staged()[at] = position_in(rank); });
#pragma unroll 1
    while (bin) {
      const int e = __ffs(bin) - 1;
      bin &= bin - 1;
      state().ranked[atomicAdd(&state().slots, 1)] = pick_rank(mine, e, kMost);
    }
    __syncthreads();
    if (ordered) {
      rank_few(state().ranked, found.count, found.above, kThreads,
               [](unsigned at, u64 rank) { own_list()[at] = rank; });
      __syncthreads();
      apart().put_sorted(own_list(), k());
      return true;
    }
    put_staged_and_ranked(found.above, state().ranked, found.count);
    if (request.values) {
      __syncthreads();
      each([](unsigned at, u64 rank) { staged()[at] = __float_as_uint(value_of(key_in(rank))); });
      __syncthreads();
      put_staged(reinterpret_cast<unsigned*>(request.values), found.above);
    }
    return true;
  }

  // Where the selected meet, in place of histograms that have been read, to be written side by side: as they
  // come each would be a word to memory of its own.
  static __device__ __forceinline__ unsigned* staged() { return histogram(); }
  // The first n of them, to a row of the output, by the threads from `first` on: four at a time, as what a warp does costs
  // the time of all.
  __device__ __forceinline__ void put_staged(unsigned* output, unsigned n, unsigned first = 0) const {
    static_assert(2 * kBins >= kSlack, "K of them");
    if (threadIdx.x < first) return;
    unsigned* const to = output + row * k();
    const unsigned fours = (size_t)to % sizeof(uint4) == 0 ? n / 4 : 0, own = threadIdx.x - first;
#pragma unroll 4
    for (unsigned i = own; i < fours; i += kThreads - first) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(staged())[i];
    }
#pragma unroll 1
    for (unsigned i = fours * 4 + own; i < n; i += kThreads - first) to[i] = staged()[i];
  }
  // The first n of them, and after these the best of m that all pairs say: each by warps of its own.
  __device__ __forceinline__ void put_staged_and_ranked(unsigned n, const u64* ranked, int m) const {
    // Ranking is what takes long, however few they are.
    const int ranks = min((m + 3) / 4, kWarps - 2) * 32;
    put_staged(request.positions, n, ranks);
    if ((int)threadIdx.x < ranks) put_ranked(ranked, m, n, ranks);
  }

  // Where this thread's so many go, after those of lanes before it and of warps that came before.
  static __device__ __forceinline__ unsigned places(unsigned mine) {
    const unsigned inclusive = inclusive_sum(mine);
    unsigned at = 0;
    if (threadIdx.x % 32 == 31) at = shared_add(&state().kept, inclusive);
    return __shfl_sync(~0u, at, 31) + inclusive - mine;
  }

  // Of up to kRanked candidates the best that there is room for after the first `above`: each is compared with
  // all, by eight of the first `threads` threads.
  __device__ __forceinline__ void put_ranked(const u64* ranked, int m, unsigned above, int threads = kThreads) const {
    rank_few(ranked, m, above, threads, [&](unsigned at, u64 rank) { put(at, rank); });
  }
  // The same, to f(where, which).
  template <class F>
  __device__ __forceinline__ void rank_few(const u64* ranked, int m, unsigned above, int threads, F f) const {
#pragma unroll 1
    for (int base = threadIdx.x / 32 * 4; base < m; base += threads / 8) {
      const int i = base + (int)threadIdx.x % 32 / 8;
      const u64 mine = ranked[min(i, m - 1)];
      unsigned better = 0;
#pragma unroll 4
      for (int other = threadIdx.x % 8; other < m; other += 8) better += ranked[other] > mine;
      better = warp_reduce<8>(better, [](unsigned a, unsigned b) { return a + b; }) + above;
      if (threadIdx.x % 8 == 0 && i < m && better < k()) f(better, mine);
    }
  }

  // ---- Rows that the block holds in its registers.

  __device__ __forceinline__ bool fits() const { return scores.vectors <= kDepth * kThreads; }

  // All of such a row: an exact histogram of coarse keys says which scores are in its set and in which bin the
  // K-th lies. `held` is all of it but the ends. The histogram is clear; all threads have arrived.
  __device__ __forceinline__ void select_held(const Vector<T> (&held)[kDepth]) const {
    const Slice slice(0, 1, scores.vectors);
    if (scores.length > k()) {
      unsigned keys[kDepth][kWidth / 2];
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        const bool inside = threadIdx.x + d * kThreads < scores.vectors;
#pragma unroll
        for (int w = 0; w < kWidth; w += 2) {
          // Below all where there is none.
          const unsigned both = inside ? coarse_keys(half_pair(held[d].at[w], held[d].at[w + 1])) : 0;
          keys[d][w / 2] = both;
          if (inside) {
            count_in(histogram(), (both & 0xffff) >> 5);
            count_in(histogram(), both >> 21);
          }
        }
      }
      const auto bin_of = [](float x) { return coarse_keys(half_pair(x, x)) >> 21; };
      ends(slice, [&](float x, int) { count_in(histogram(), bin_of(x)); });
      if (threadIdx.x == 0) state().kept = 0, state().slots = 0;
      __syncthreads();
      find_bins(0, k(), 0);
      const Found found = state().found[0];
      // Up to bin 31 it is no number.
      if (found.bin > 31 && found.above + found.count <= capacity()) return put_held(held, keys, slice, found);
      __syncthreads();
    }
    apart().collect(slice, 0, kAllKeys);
    put_route(kDirect);
    const int n = state().count;
    const unsigned count = min((unsigned)n, k());
    apart().finish_any(own_list(), n, count);
    put_rest(count);
  }

  // What lies in the bins above that of the K-th, and the best of its bin.
  __device__ __forceinline__ void put_held(const Vector<T> (&held)[kDepth], const unsigned (&keys)[kDepth][kWidth / 2],
                                           const Slice& slice, Found found) const {
    const bool ordered = request.order != kUnordered;
    const unsigned low = found.bin << 5, high = low + 32;
    // What reaches this goes to the output, or to the list where it is to be ordered.
    const unsigned reach = ordered ? low : high;
    const auto key = [&](int d, int w) { return w % 2 ? keys[d][w / 2] >> 16 : keys[d][w / 2] & 0xffff; };
    // Loops without branches, and one over what is rare.
    unsigned mine = 0, other = 0;
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
#pragma unroll
      for (int w = 0; w < kWidth; w++) {
        mine += key(d, w) >= reach;
        other |= (unsigned)(key(d, w) - low < 32) << (d * kWidth + w);
      }
    }
    if (ordered) other = 0;
    const unsigned first = places(mine);
    const auto each = [&](auto f) {
      unsigned at = first;
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        const int column = scores.column(threadIdx.x + d * kThreads);
#pragma unroll
        for (int w = 0; w < kWidth; w++) {
          if (key(d, w) >= reach) f(at++, column + w, held[d].at[w]);
        }
      }
    };
    if (ordered) {
      each([&](unsigned at, int column, T x) { own_list()[at] = rank_of(key_of_number(widen(x)), column); });
    } else {
      each([&](unsigned at, int column, T) { staged()[at] = column; });
    }
    // The few of the K-th's bin.
    const auto keep = [&](u64 rank) { own_list()[atomicAdd(&state().slots, 1)] = rank; };
#pragma unroll 1
    while (other) {
      const int i = __ffs(other) - 1;
      other &= other - 1;
      const int d = i / kWidth;
      const float x = pick(held, i);
      keep(rank_of(key_of_number(x), scores.column(threadIdx.x + d * kThreads) + i % kWidth));
    }
    ends(slice, [&](float x, int column) {
      const unsigned both = coarse_keys(half_pair(x, x)) >> 16;
      if (both < low) return;
      const u64 rank = rank_of(key_of_number(x), column);
      if (both < reach) return keep(rank);
      const unsigned at = atomicAdd(&state().kept, 1);
      if (ordered) own_list()[at] = rank;
      else staged()[at] = column;
    });
    if (threadIdx.x == 0) {
      state().counters.read += scores.length;
      state().counters.admitted += found.above + found.count;
    }
    __syncthreads();
    const int m = found.count;
    put_route(kDirect);
    if (ordered) {
      apart().finish_any(own_list(), found.above + m, k());
      return put_rest(k());
    }
    put_staged(request.positions, found.above);
    if (request.values) {
      // Of what was selected by its bin the scores are in L2 still.
#pragma unroll 1
      for (unsigned i = threadIdx.x; i < found.above; i += kThreads) {
        const float x = widen(scores.data[(int)staged()[i] - scores.start]);
        request.values[row * k() + i] = value_of(key_of_number(x));
      }
    }
    __syncthreads();
    if (m <= kRanked) {
      put_ranked(own_list().at(), m, found.above);
    } else {
      const u64 threshold = refine(own_list(), m, k() - found.above);
      put_unordered(own_list(), m, found.above, [&](u64 rank) { return rank >= threshold; });
    }
    put_rest(k());
  }

  // The selection of such a row, where nothing of it is held yet.
  __device__ __noinline__ void select_fitting() const {
    Vector<T> held[kDepth];
    load(held, Slice(0, 1, scores.vectors), threadIdx.x);
    select_held(held);
  }

  // ---- Order.

  static_assert(kSlack % kThreads == 0, "as many as K may be");
  static constexpr int kSelected = kSlack / kThreads;  // of a thread, at most

  // The first n of a list, all of them selected, in the request's order. All threads have arrived, and see the list.
  __device__ __noinline__ void put_sorted(List list, unsigned n) const {
    u64 mine[kSelected];
    unsigned at[kSelected];  // where each goes
#pragma unroll
    for (int e = 0; e < kSelected; e++) {
      const unsigned i = threadIdx.x + e * kThreads;
      mine[e] = i < n ? list[i] : 0;
    }
    if (request.order == kByPosition && bitmap_quads() * kQuadBytes <= capacity() * sizeof(u64)) {
      order_by_bitmap(list, mine, n, at);
    } else if (!order_by_buckets(list, mine, n, at)) {
#pragma unroll 1
      for (unsigned i = threadIdx.x; i < n; i += kThreads) put(i, list[sorted()[i]]);
      return;
    }
    const auto put_words = [&](unsigned* output, auto word) {
#pragma unroll
      for (int e = 0; e < kSelected; e++) {
        if (threadIdx.x + e * kThreads < n) staged()[at[e]] = word(mine[e]);
      }
      __syncthreads();
      put_staged(output, n);
    };
    put_words(request.positions, position_in);
    if (request.values) {
      __syncthreads();
      put_words(reinterpret_cast<unsigned*>(request.values),
                [](u64 rank) { return __float_as_uint(value_of(key_in(rank))); });
    }
  }

  // A bit for each of the row's positions, and for each word of them how many there are before it: of four words.
  static constexpr unsigned kQuadBytes = 4 * (sizeof(unsigned) + sizeof(unsigned short));
  __device__ __forceinline__ unsigned bitmap_quads() const { return (unsigned)(scores.length + 127) / 128; }

  // By position: as many go before one as there are bits before its own. In the place of the list.
  __device__ __forceinline__ void order_by_bitmap(List list, const u64 (&mine)[kSelected], unsigned n,
                                                  unsigned (&at)[kSelected]) const {
    const unsigned quads = bitmap_quads(), each = (quads + kThreads - 1) / kThreads;
    uint4* bitmap = reinterpret_cast<uint4*>(list.at());
    unsigned* words = reinterpret_cast<unsigned*>(bitmap);
    ushort4* before = reinterpret_cast<ushort4*>(bitmap + quads);
    __syncthreads();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < quads; i += kThreads) bitmap[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kSelected; e++) {
      if (e * kThreads >= n) break;
      at[e] = position_in(mine[e]) - scores.start;
      if (threadIdx.x + e * kThreads < n) atomicOr(&words[at[e] / 32], 1u << at[e] % 32);
    }
    __syncthreads();
    const unsigned first = threadIdx.x * each, end = min(first + each, quads);
    unsigned sum = 0;
#pragma unroll 2
    for (unsigned i = first; i < end; i++) {
      const uint4 four = bitmap[i];
      sum += __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
    }
    unsigned count = sum_before(sum);
#pragma unroll 2
    for (unsigned i = first; i < end; i++) {
      const uint4 four = bitmap[i];
      const unsigned y = count + __popc(four.x), z = y + __popc(four.y), w = z + __popc(four.z);
      before[i] = make_ushort4(count, y, z, w);
      count = w + __popc(four.w);
    }
    __syncthreads();
    const unsigned short* counts = reinterpret_cast<const unsigned short*>(before);
#pragma unroll
    for (int e = 0; e < kSelected; e++) {
      if (e * kThreads >= n) break;
      if (threadIdx.x + e * kThreads < n) {
        const unsigned word = at[e] / 32;
        at[e] = counts[word] + __popc(words[word] & ((1u << at[e] % 32) - 1));
      }
    }
  }

  // By buckets of their bits, and within each by comparing all pairs. False where too many share a bucket: then
  // `sorted` says it.
  __device__ __forceinline__ bool order_by_buckets(List list, const u64 (&mine)[kSelected], unsigned n,
                                                   unsigned (&at)[kSelected]) const {
    const bool by_value = request.order == kByValue;
    const u64 mask = by_value ? ~0ull : 0xffffffffull;
    // By position it is the complement, in the low word, that descends.
    const auto word = [&](u64 rank) { return by_value ? key_in(rank) : (unsigned)rank; };
    clear(buckets());
    unsigned least = ~0u, most = 0;
#pragma unroll
    for (int e = 0; e < kSelected; e++) {
      if (e * kThreads >= n) break;
      if (threadIdx.x + e * kThreads < n) least = min(least, word(mine[e])), most = max(most, word(mine[e]));
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
    if (lane == 0) state().low[warp] = least, state().high[warp] = most;
    __syncthreads();
    const unsigned low = __reduce_min_sync(~0u, lane < kWarps ? state().low[lane] : ~0u);
    const unsigned high = __reduce_max_sync(~0u, lane < kWarps ? state().high[lane] : 0);
    // Of 2^32 a part as great as of the width a bucket. Approximate, and alike in all threads.
    const float part = __fdividef(kBins * 4294963200.0f, (float)(high - low) + 1.0f);
    const unsigned scale = (unsigned)fminf(part, 4294967040.0f);
    const auto bucket = [&](u64 rank) { return min(__umulhi(word(rank) - low, scale), kBins - 1u); };
#pragma unroll
    for (int e = 0; e < kSelected; e++) {
      if (e * kThreads >= n) break;
      if (threadIdx.x + e * kThreads < n) at[e] = shared_add(&buckets()[bucket(mine[e])], 1);
    }
    __syncthreads();
    unsigned* offsets = histogram();
    const FromTop own(buckets());
    unsigned before = sum_before(own.sum);
    bool crowded = false;
#pragma unroll
    for (int i = 0; i < FromTop::kOwn; i++) {
      offsets[own.top - i] = before, before += own.own[i];
      crowded |= own.own[i] > kCrowd;
    }
    if (__syncthreads_or(crowded)) {
      apart().sort(list, n, mask);
      return false;
    }
#pragma unroll
    for (int e = 0; e < kSelected; e++) {
      if (e * kThreads >= n) break;
      if (threadIdx.x + e * kThreads < n) list[offsets[bucket(mine[e])] + at[e]] = mine[e];
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kSelected; e++) {
      if (e * kThreads >= n) break;
      if (threadIdx.x + e * kThreads < n) {
        const unsigned b = bucket(mine[e]), first = offsets[b], end = first + buckets()[b];
        unsigned better = first;
#pragma unroll 4
        for (unsigned other = first; other < end; other++) better += (list[other] & mask) > (mine[e] & mask);
        at[e] = better;
      }
    }
    // What is staged next lies where the offsets are.
    __syncthreads();
    return true;
  }

  // Numbers of selected candidates, behind the lists.
  __device__ __forceinline__ unsigned short* sorted() const {
    return reinterpret_cast<unsigned short*>(List{(int)capacity() * lists}.at());
  }

  // Bitonic sort of the selected, descending, by their numbers: where too many share a bucket.
  __device__ __noinline__ void sort(List list, unsigned count, u64 mask) const {
    constexpr unsigned short kLast = 0xffff;
    unsigned size = 1;
    while (size < count) size *= 2;
    for (unsigned i = threadIdx.x; i < size; i += kThreads) sorted()[i] = i < count ? i : kLast;
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
  if (threadIdx.x == 0) state().count = 0, state().inbox = 0;
  if (threadIdx.x == kThreads - 1) state().counters = state().gathered = RouteCounters{0, 0, 0, 0};
  __syncthreads();
}

// What a block reads first of its row: with kHeld its first vectors, and its first sampled ones.
template <class T, bool kHeld>
struct Opening {
  Vector<T> held[kDepth], sampled[kSampled];
  bool early;

  // Where every row starts at 0, that need not wait for its end: what lies beyond it is only not looked at.
  // And what follows in the block's part of the row is sent for, to L2.
  __device__ __forceinline__ Opening(const Request& request, long long row, int rank) {
    const Selector<T> whole(request, row, 0, request.width, 1);
    early = request.start.kind == kNone && !request.fixed_stride;
    if (early) load(whole, rank);
    if (!kHeld) return;
    // More would hold up the sample.
    constexpr int kMost = 16;
    const Slice slice(rank, request.blocks, whole.scores.vectors);
    // Eight threads have a line.
    const int from = early ? kDepth : 0;
    if (threadIdx.x % 8 == 0) {
#pragma unroll 4
      for (int d = from; d < kMost; d++) {
        const int j = slice.first + d * slice.step;
        if (j >= slice.end) break;
        prefetch_to_l2(whole.scores.whole() + j);
      }
    }
  }

  __device__ __forceinline__ void load(const Selector<T>& selector, int rank) {
    const Slice slice(rank, selector.request.blocks, selector.scores.vectors);
    if (!selector.request.fixed_stride) selector.load_sampled(sampled, threadIdx.x);
    if (kHeld) selector.load(held, slice, slice.first);
  }
};

// Whether a row needs no scores.
__device__ __forceinline__ bool is_trivial(const Request& request, int length) {
  return length <= 0 || (length <= request.k && request.order != kByValue && !request.values);
}
