// Exact top-k, top-p and min-p of one row by a team of blocks, after Qrita (arXiv 2602.01518).
//
// A kept set is a prefix of the row in descending order, ties by position, so it is described by
// its cut: the key of its last element, and the positions up to which that key is kept. The cut is
// found in four parts; the first three follow the paper's sections 3.1 to 3.3:
//
//  1. Sigma-truncation. A block of sampled logits proposes a threshold that the kept set should lie
//     above: where the set is small, by the order statistics of the sample, which no law of the
//     logits misleads, or by the weight that a top-p spares; else by its mean and deviation, as the
//     paper does. One pass over the row, the only one for a set that is found above the threshold, takes the maximum, gathers what reaches
//     the threshold into shared memory, the candidates, and where top-p needs it, sums the weights
//     of the rest in f32. A cluster that holds the whole row on chip needs no sample: the greatest
//     logits of 128 parts of the row propose the threshold, and the pass reads shared memory.
//  2. Where the cut lies among the best 128, a histogram of the candidates finds those, and comparisons
//     of all pairs rank them. A warp adds up the weights above each, in f32. What such sums leave open, by
//     their rounding, sums in f64 decide, and at last exact ones. Of the rest the f32 sum decides a top-p
//     only where its error bound admits one answer; else the exact sum is taken in a second pass. The bound
//     is one on the rest's mass, which is small where the set is.
//  3. Pivot search, for larger sets. Where the candidates hold the set (a hit), three pivots at a
//     time split the range of keys that the cut lies in. The range is one of integers, not of
//     values, and before each step it shrinks to the keys that exist in it, so at most 16 steps leave
//     one key, whatever the values; as soon as 32 elements are left in it, a warp ranks them. Where
//     the bounds of the f32 sum give one answer, no exact sum is taken. On a miss, and for a top-k of
//     more than can be gathered from the start, two values are proposed that the cut lies between, a
//     bracket: by a sample, which is right but in a few rows of 100,000, or by mass in a row that is on
//     chip by a histogram of all of it. One pass sums what is above the bracket, and all, with a
//     histogram of what is inside, and the cut lies in a bin of few elements. A cluster sums exactly,
//     looks those few up on chip, and a warp compares them. One block, which would read the row once more for
//     that, counts alone what is inside: that bounds the masses of bins, so the cut lies in one or two.
//     The pass that writes, or sums for a draw, has time for exact sums while it waits for memory: it
//     notes the few, and they are settled after it. Where the bracket misses, or the bins are full, a
//     histogram of the row narrows the range by 2048 at a time until what is in it fits into shared
//     memory, and the search goes on there.
//  4. Duplicates. Of the elements that have the cut's key, those with the lowest positions are
//     kept. The same pivot search, over positions, finds the last of them.
//
// A team's members pass over a slice of the row each; gathered elements are exchanged once, and what
// is on chip every member works through by itself, without a word to the others.
//
// Weights and sums of weights that decide are integers (softmax.cuh), or sums beyond whose bounds they decide the same: no
// order of arrival shows.
#pragma once

#include <new>

#include "../common/order.cuh"
#include "../common/philox.cuh"
#include "../common/row.cuh"
#include "../common/softmax.cuh"
#include "../common/team.cuh"
#include "variant.cuh"

// `kCandidates`, how many candidates fit on chip, is the including file's.
constexpr int kBins = 2048;

// The logits of a batch and their parameters: `Request` in src/sampling/cuda.rs.
struct Request {
  const void* logits;
  long long row_stride;
  // Packed rows of top-k, top-p, min-p, temperature, or null: then the scalars serve every row.
  const float* params;
  long long params_row, params_column;
  float top_k, top_p, min_p, temperature;
  int vocab;
  int joint;
  // Null, or four counters a row: `RouteCounters`.
  unsigned* routes;
};

// How a row's cut was found: `Routes` in src/sampling/buffers.rs. Only the first thread of a block
// counts, and only the first block of a team reports.
constexpr unsigned kHit = 1, kSecondPass = 2, kFallback = 4, kNoTruncation = 8;
struct RouteCounters {
  unsigned route, gathered, steps, passes;
};
__device__ __forceinline__ RouteCounters& route_counters() {
  __shared__ RouteCounters counters;
  return counters;
}
__device__ __forceinline__ void count_step() {
  if (threadIdx.x == 0) route_counters().steps++;
}
__device__ __forceinline__ void count_pass(unsigned route = 0) {
  if (threadIdx.x == 0) route_counters().passes++, route_counters().route |= route;
}

// One row's parameters: `RowTruncation` in src/sampling/truncation.rs.
struct Truncation {
  unsigned top_k;  // 0: no limit
  float top_p;     // 1 and above: no limit
  float min_p;     // 0 and below: no limit
  float temperature;

  Truncation() = default;
  __device__ Truncation(const Request& r, long long row) {
    float k = r.top_k, p = r.top_p, m = r.min_p, t = r.temperature;
    if (r.params) {
      const float* at = r.params + row * r.params_row;
      k = at[0], p = at[r.params_column], m = at[2 * r.params_column], t = at[3 * r.params_column];
    }
    if (t > 0.0f && p > 0.0f && m <= 1.0f) {
      // The conversion saturates, and sends NaN to 0.
      top_k = __float2uint_rz(k), top_p = p, min_p = m, temperature = t;
    } else {
      top_k = 1, top_p = 1.0f, min_p = 0.0f, temperature = 1.0f;
    }
  }
};

struct alignas(16) Elements {
  unsigned keys[kCandidates], positions[kCandidates];
};

struct alignas(16) Histogram {
  // Sums of 96 bits, by words.
  unsigned counts[kBins], mass0[kBins], mass1[kBins], mass2[kBins];
};

constexpr int kSegments = kThreads > 512 ? 128 : 64;

// Values between two of a row, in bins of even width: `kBinsOf<C>` of them.
template <int C>
constexpr int kBinsOf = C == 1 ? 1024 : 512;
struct Bracket {
  float low, high;
  float bins;  // to a unit

  // For values inside. The greater the value, the higher its bin, as every rounding keeps the order.
  template <int C>
  __device__ __forceinline__ unsigned bin(float x) const {
    return min(__float2uint_rz((x - low) * bins), kBinsOf<C> - 1u);
  }
};
// Of a member: what its slice has in each bin, and then what the team has, as the members tell each other.
template <int C>
struct alignas(16) BracketHistogram {
  unsigned counts[kBinsOf<C>], mass0[kBinsOf<C>], mass1[kBinsOf<C>], mass2[kBinsOf<C>];
  Mass sums[kBinsOf<C>];
};
// One block does not add up masses, but bounds them.
template <>
struct alignas(16) BracketHistogram<1> {
  unsigned counts[kBinsOf<1>];
};

// The best of a row in order, found first in any order.
constexpr int kTop = 128, kTopBins = 256, kTopEach = kTop / 32;
struct alignas(16) Top {
  // The key, and the position's complement: the order as an integer. kNoOrder beyond the last.
  u64 orders[kTop];
  float weights[kTop];
  unsigned char by_rank[kTop];
  unsigned short by_id[kTop];  // and the rank, in the upper half
  float others[32];            // of what is gathered and not ranked: a warp's
  unsigned bins[kTopBins];
  unsigned slots;

  __device__ __forceinline__ u64 ranked(unsigned rank) const { return orders[by_rank[rank]]; }
  __device__ __forceinline__ u64 mass(unsigned element) const { return Softmax::mass_of(weights[element]); }
};

// How far off a sum of the ranked is at most, and what is made from it by a few operations, relative. What is decided by
// it is decided beyond this; where sums are closer, by better ones, and at last by exact ones. Members decide alike: they
// add up the same, in the order of ranks.
template <class N>
struct Rounding;
// No weight takes part in more than 11 additions.
template <>
struct Rounding<float> {
  static constexpr float kMost = 0x1p-19f;
  static __device__ __forceinline__ float round(float weight) { return weight; }
};
// The ranked as multiples of 2^-40, of which all sums are exact: there is a weight of 1, and no more than kTop are off by
// 2^-41. What is added to their sum, of the rest, rounds it by 2^-53.
static_assert(kTop <= 1 << 12, "sums are below 2^13");
template <>
struct Rounding<double> {
  static constexpr double kMost = 0x1p-27;
  static __device__ __forceinline__ double round(float weight) { return (double)weight + 0x1.8p12 - 0x1.8p12; }
};

// Below every other, and of no lower id.
constexpr u64 kNoOrder = 0x80000000u;

// Ranks the first `count` of the orders, at most kTop, and if wanted their ids: by comparisons of all with all.
__device__ __forceinline__ void rank_orders(Top& top, unsigned count, bool by_id) {
  // A thread compares four elements at a time: loads, of which each serves all four, would take the most time.
  constexpr unsigned kEach = 4, kLogThreads = __builtin_ctz(kThreads);
  static_assert(kThreads >= 4 * kTop / kEach, "an element's rank is told by a thread");
  const unsigned tiles = (count + kEach - 1) / kEach;
  // As many threads as there are for each of the least power of two of tiles; not so many that what each does besides
  // takes longer.
  const unsigned log_parts = min(4u, kLogThreads - (tiles > 1 ? 32 - __clz(tiles - 1) : 0));
  const unsigned parts = 1u << log_parts, tile = threadIdx.x >> log_parts, part = threadIdx.x & (parts - 1);
  if (threadIdx.x / 32 * 32 >> log_parts >= tiles) return;
  const auto two = [&](unsigned pair) { return reinterpret_cast<const ulonglong2*>(top.orders)[pair]; };
  const unsigned own = min(tile, kTop / kEach - 1);
  const ulonglong2 a = two(2 * own), b = two(2 * own + 1);
  const u64 mine[kEach] = {a.x, a.y, b.x, b.y};
  unsigned rank[kEach] = {}, place[kEach] = {};
#pragma unroll 1
  for (unsigned pair = part; 2 * pair < count; pair += parts) {
    const ulonglong2 both = two(pair);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      rank[i] -= all_if_above(both.x, mine[i]) + all_if_above(both.y, mine[i]);
      if (!by_id) continue;
      // Complements: the greater one is the lower id. They are not below 2^31.
      place[i] += (unsigned)mine[i] - (unsigned)both.x >> 31;
      place[i] += (unsigned)mine[i] - (unsigned)both.y >> 31;
    }
  }
  // Four in a word: none has more than 8 bits.
  unsigned ranks = rank[0] | rank[1] << 8 | rank[2] << 16 | rank[3] << 24;
  unsigned places = place[0] | place[1] << 8 | place[2] << 16 | place[3] << 24;
#pragma unroll
  for (unsigned lanes = 1; lanes < 16; lanes *= 2) {
    if (lanes >= parts) break;
    ranks += __shfl_xor_sync(~0u, ranks, lanes);
    if (by_id) places += __shfl_xor_sync(~0u, places, lanes);
  }
  const unsigned element = tile * kEach + part;
  if (part < kEach && element < count) {
    const unsigned rank = ranks >> 8 * part & 0xff, place = places >> 8 * part & 0xff;
    top.by_rank[rank] = element;
    if (by_id) top.by_id[place] = element | rank << 8;
  }
}

// The sums over the lanes before this one, and over all.
template <class N>
__device__ __forceinline__ N exclusive_sum(N x, N* total) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const N below = shuffle_up(x, lanes);
    x += lane >= lanes ? below : N(0);
  }
  *total = shuffle(x, 31);
  const N before = shuffle_up(x, 1);
  return lane > 0 ? before : N(0);
}

// Counts an element of a bin, and adds its mass.
template <class H>
__device__ __forceinline__ void add_mass(H* histogram, unsigned bin, u64 mass) {
  shared_add(&histogram->counts[bin], 1);
  const unsigned low = (unsigned)mass;
  const unsigned carry = shared_add(&histogram->mass0[bin], low) > ~low;
  // A mass is at most 2^62, so its upper word takes the carry.
  const unsigned high = (unsigned)(mass >> 32) + carry;
  if (high && shared_add(&histogram->mass1[bin], high) > ~high) shared_add(&histogram->mass2[bin], 1);
}

// The elements of a bin that are settled by comparisons: a member's, and what the members have sent.
template <int C>
struct alignas(16) Few {
  static constexpr unsigned kMost = 32;
  u64 own[kMost], heard[C][kMost];
  unsigned slots, counts[C];
  // Of the pass: the warps' sums.
  Mass parts[2][kWarps];
};

// Room for a truncation's state: `Kept::apart`.
struct alignas(16) Apart {
  unsigned char bytes[256];
};

// Dynamic shared memory: `shared_bytes` in src/sampling/cuda.rs. A member of a larger team collects
// its slice's part first, and then everybody's; the copy of its slice of the row, if any, follows.
template <int C>
struct alignas(128) Shared {
  union {
    Top top;
    struct {
      union {
        Mass segments[kSegments];
        Few<C> few;
      };
      Apart apart;
    };
  };
  union {
    struct {
      Elements gathered, slice;
    };
    Histogram histogram;
    BracketHistogram<C> bracketed;
  };
};
template <>
struct alignas(128) Shared<1> {
  union {
    Top top;
    struct {
      union {
        Mass segments[kSegments];
        Few<1> few;
      };
      Apart apart;
    };
  };
  union {
    Elements gathered;
    Elements slice;
    Histogram histogram;
    BracketHistogram<1> bracketed;
  };
};
static_assert(sizeof(BracketHistogram<8>) <= sizeof(Elements), "no member notes elements where another still counts");
static_assert(sizeof(Shared<1>) == 3200 + (32 << 10) || sizeof(Shared<8>) == 3200 + (32 << 10),
              "src/sampling/cuda.rs asks for as much");

// A measure of elements: their number or their mass. The search is the same for both.
struct Count {
  typedef unsigned Sum;
  static __device__ __forceinline__ unsigned zero() { return 0; }
  static __device__ __forceinline__ unsigned warp(unsigned x) { return __reduce_add_sync(~0u, x); }
};
struct Weight {
  typedef Mass Sum;
  static __device__ __forceinline__ Mass zero() { return {0, 0}; }
  static __device__ __forceinline__ Mass warp(Mass x) { return warp_sum(x); }
};

struct AddSums {
  template <class S>
  __device__ __forceinline__ S operator()(S a, S b) const { return a + b; }
};

// The sum of a measure over the block.
template <class M>
__device__ __noinline__ typename M::Sum block_sum(typename M::Sum v) {
  __shared__ typename M::Sum parts[kWarps];
  v = M::warp(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return M::warp(lane < kWarps ? parts[lane] : M::zero());
}

// Where a search ended: the key at which the measure, taken in descending order, reaches the
// target, and the measure of all greater keys.
template <class M>
struct Found {
  unsigned key;
  typename M::Sum above;
};

// Quaternary search among `n` elements in shared memory for the key in [low, high] at which
// `above`, the measure beyond `high`, plus the measure of what is in the range reaches `target`.
// key(i, &key) gives an element's key, or false where it takes no part; measure(i) its measure.
template <class M, class Key, class Measure>
__device__ Found<M> pivot_search(int n, unsigned low, unsigned high, typename M::Sum above,
                                 typename M::Sum target, Key key_at, Measure measure) {
  typedef typename M::Sum Sum;
  __shared__ struct {
    unsigned left, low, high;
    int slots, index[32];
    Sum sums[3][kWarps];
  } step;
  const int lane = threadIdx.x % 32;
  while (true) {
    // Shrink the range to the keys that exist in it.
    count_step();
    __syncthreads();
    if (threadIdx.x == 0) step.left = 0, step.low = ~0u, step.high = 0, step.slots = 0;
    __syncthreads();
    unsigned left = 0, least = ~0u, most = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += kThreads) {
      unsigned key;
      if (key_at(i, &key) && key >= low && key <= high) {
        left++, least = min(least, key), most = max(most, key);
      }
    }
    left = __reduce_add_sync(~0u, left);
    least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
    if (lane == 0 && left) {
      atomicAdd(&step.left, left), atomicMin(&step.low, least), atomicMax(&step.high, most);
    }
    __syncthreads();
    low = step.low, high = step.high, left = step.left;
    if (low >= high) return {high, above};

    if (left <= 32) {
#pragma unroll 1
      for (int i = threadIdx.x; i < n; i += kThreads) {
        unsigned key;
        if (key_at(i, &key) && key >= low && key <= high) step.index[atomicAdd(&step.slots, 1)] = i;
      }
      __syncthreads();
      // Each lane: the measure of what is greater than its element, and its own key's.
      const bool mine = lane < left;
      unsigned key = 0;
      Sum own = M::zero(), greater = M::zero(), equal = M::zero();
      if (mine) key_at(step.index[lane], &key), own = measure(step.index[lane]);
#pragma unroll 1
      for (int other = 0; other < left; other++) {
        const unsigned its_key = __shfl_sync(~0u, key, other);
        const Sum its = shuffle(own, other);
        if (its_key > key) greater = greater + its;
        if (its_key == key) equal = equal + its;
      }
      greater = above + greater;
      const unsigned ends = __ballot_sync(~0u, mine && greater < target && !(greater + equal < target));
      const int end = __ffs(ends) - 1;
      return {__shfl_sync(~0u, key, end), shuffle(greater, end)};
    }

    if constexpr (kVariant.searches == Searches::kBinary) {
      Alternatives::halve<M>(n, &low, &high, &above, target, key_at, measure);
      continue;
    }
    const unsigned width = high - low;
    const unsigned p1 = low + width / 4, p2 = low + width / 2, p3 = high - 1 - width / 4;
    // The measures of (p3, high], (p2, p3] and (p1, p2].
    Sum sums[3] = {M::zero(), M::zero(), M::zero()};
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += kThreads) {
      unsigned key;
      if (key_at(i, &key) && key > p1 && key <= high) {
        const Sum its = measure(i);
        if (key > p3) sums[0] = sums[0] + its;
        else if (key > p2) sums[1] = sums[1] + its;
        else sums[2] = sums[2] + its;
      }
    }
#pragma unroll
    for (int s = 0; s < 3; s++) {
      sums[s] = M::warp(sums[s]);
      if (lane == 0) step.sums[s][threadIdx.x / 32] = sums[s];
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < 3; s++) sums[s] = M::warp(lane < kWarps ? step.sums[s][lane] : M::zero());
    const Sum above3 = above + sums[0], above2 = above3 + sums[1], above1 = above2 + sums[2];
    if (!(above3 < target)) low = p3 + 1;
    else if (!(above2 < target)) above = above3, high = p3, low = p2 + 1;
    else if (!(above1 < target)) above = above2, high = p2, low = p1 + 1;
    else above = above1, high = p1;
  }
}

// What the truncation of a row finds.
struct Cut {
  Softmax softmax;

  unsigned best_key, best_position;
  unsigned numbers;  // how many logits are above -inf; where these exceed k, at least as many as k
  bool has_nan, has_infinity;

  // The cut: an element is kept where its key is greater, or equal at a position below `end`.
  unsigned cut_key, cut_end;

  // How many are kept, where `shared.top` ranks them; else 0. How many it ranks, and whether the pass has left its
  // elements there.
  unsigned members, ranked;
  bool on_top = false;
  // The scale of the pass's weights: by a logit's and the reference's product with it.
  float scale;
  // How often the members have told each other what a pass has found, and sent what they gathered.
  unsigned rounds = 0, sendings = 0;
  // Where the row is on chip, the greatest of what the thread has looked at, and of the row: NaN if it
  // holds one.
  float own_best, row_best;
  // And the sum of the weights of what the thread has looked at, relative to the greatest of the row.
  float own_sum;
  // Whether a member may be read by another: it may not end then.
  mutable bool reads = false;

  // Shared memory holds the `gathered` elements of the whole row whose keys lie in [low, high].
  unsigned low, high;
  int gathered;

  // Whether the cut is still open. It is known then to lie in a range of few elements: what is above is kept, and
  // what is below isn't. A pass over the row that has more to do notes those inside as well, and then settles it.
  bool open = false;

  __device__ __forceinline__ explicit Cut(const Softmax& softmax) : softmax(softmax) {}
};

// The truncation of one row. Every member is uniform over the team.
template <class T, int C>
struct Kept : Cut {
  // Large sets are cut by brackets, except in runs of the ablation.
  static constexpr bool kBrackets =
      kVariant.searches == Searches::kRanked && kVariant.truncates == Truncates::kProposed && kVariant.cuts_duplicates;
  // Loads in flight for the pass that does little else.
  static constexpr int kLight = kVariant.in_flight > 0 ? kVariant.in_flight : kThreads > 512 ? 3 : 4;
  friend struct Alternatives;
  typedef Row<T, (C > 1)> TeamRow;

  // The sample: a few vectors a thread, in pieces evenly from the row. A piece is what memory reads at once. Single
  // vectors would have it read four times as many bytes, most of them again when the pass comes to them.
  struct Sampled {
    static constexpr int kSize = kThreads * Row<T>::kWidth > 4096 ? kThreads * Row<T>::kWidth : 4096;
    static constexpr int kVectors = kSize / kThreads / Row<T>::kWidth;
    static constexpr int kPiece = 64 / sizeof(uint4), kPieces = kThreads * kVectors / kPiece;
    Vector<T> vectors[kVectors];

    __device__ explicit Sampled(const TeamRow& row) {
      const int last = max(row.vectors() - kPiece, 0), phase = (int)((size_t)row.data / sizeof(uint4) % kPiece);
#pragma unroll
      for (int i = 0; i < kVectors; i++) {
        const int at = threadIdx.x + i * kThreads;
        const int start = (int)((long long)(at / kPiece) * (last + 1) / kPieces);
        vectors[i] = row.load_global(min(max(start - (start + phase) % kPiece, 0) + at % kPiece, row.vectors() - 1));
      }
    }
    __device__ __forceinline__ float operator()(int i, int w) const { return widen(vectors[i].at[w]); }
  };

  TeamRow row;
  Truncation limits;
  Shared<C>& shared;
  unsigned index;
  bool by_id;  // whether the best are ranked by their ids, too

  // What a proposal says: gather what reaches the threshold, or nothing. It decides the route, never
  // the result.
  struct Proposal {
    float threshold;
    bool gathers;
    float reference;  // the greatest logit that has been seen
    // A sample of the row may say better; or is to say, before all else.
    bool first_guess, asks_sample;
  };

  // Whether the set is not among the best of what has been proposed; and whether `numbers` is exact.
  bool unfinished, counted;
  Proposal proposed;

  // A copy that is known to work on shared memory.
  __device__ __forceinline__ Kept(const Kept& kept, Shared<C>& shared)
      : Cut(kept), row(kept.row), limits(kept.limits), shared(shared), index(kept.index), by_id(kept.by_id),
        unfinished(kept.unfinished), counted(kept.counted), proposed(kept.proposed) {
    if (row.staged) row.staged = copy_of_slice();
  }

  struct Open {
    unsigned from, to;
    float low, high;  // the same as values
    // The measure of what is kept of it, a mass or a number. Or that of all that is kept, if the pass that notes what is
    // inside is to sum what is above.
    bool by_mass, sums;
    Mass rest;
    unsigned slots;  // how many the member has noted
  };
  static __device__ __forceinline__ Open& left_open() {
    __shared__ Open range;
    return range;
  }

  // `by_id` is a constant. `meanwhile` is called by every thread before a barrier of the block, at a time when
  // there is nothing else to do, or little.
  template <class Meanwhile>
  __device__ Kept(const Request& r, Shared<C>& shared, unsigned index, bool by_id, Meanwhile meanwhile)
      : Cut(Softmax(0.0f, 1.0f)),
        row(static_cast<const T*>(r.logits) + index * r.row_stride, r.vocab, Team<C>::rank(), Team<C>::size()),
        shared(shared),
        index(index),
        by_id(by_id) {
    // Ordered by the barrier before the threshold is known.
    if (threadIdx.x == 0) route_counters() = RouteCounters{0, 0, 0, 0}, noted() = 0;
    // Loads that wait for nothing go out together.
    Proposal proposal;
    if constexpr (kVariant.truncates == Truncates::kNever) {
      limits = Truncation(r, row_index());
      row.prefetch();
      proposal = {0.0f, false, 0.0f, false, false};
      scale = CUDART_L2E_F / limits.temperature;
      meanwhile();
    } else if constexpr (C == 1) {
      const Sampled sampled(row);
      limits = Truncation(r, row_index());
      row.prefetch();
      scale = CUDART_L2E_F / limits.temperature;
      proposal = propose(sampled);
      meanwhile();
    } else {
      const bool staged = stage();
      if (threadIdx.x == 0) {
        for (int i = 0; i < 3; i++) mail(i).open();
        nth_greatest() = 0;
      }
      Team<C>::arrive();
      limits = Truncation(r, row_index());
      scale = CUDART_L2E_F / limits.temperature;
      if (staged) {
        proposal = propose_staged(r.joint, meanwhile);
      } else {
        const Sampled sampled(row);
        row.prefetch();
        Team<C>::wait();
        proposal = propose(sampled);
        meanwhile();
      }
    }
    members = 0, counted = false, proposed = proposal;
    unfinished = many() || proposal.asks_sample || !find_among_best(r.joint, proposal);
    if (!unfinished) report(r.routes);
  }

  // What is left to do of a row that has no members, by a copy in shared memory and with what was the thread's own.
  __device__ __forceinline__ void finish(int joint, unsigned* routes, float best, float sum) {
    own_best = best, own_sum = sum;
    if (threadIdx.x == 0) settled() = false;
    __syncthreads();
    if (unfinished) search(joint);
    report(routes);
  }

  __device__ __forceinline__ void report(unsigned* routes) const {
    if (routes && threadIdx.x == 0 && Team<C>::rank() == 0) {
      RouteCounters counters = route_counters();
      if (numbers > 0 && on_chip()) counters.route |= kHit;
      if (cut_key == kNegInfinityKey && cut_end == 0) counters.route |= kNoTruncation;
      reinterpret_cast<RouteCounters*>(routes)[row_index()] = counters;
    }
  }

  // Of the greatest logits of parts of the row; of what a pass finds; of what it gathers. And of what a bracket holds:
  // opened where it is needed, before a barrier of the team.
  static __device__ __forceinline__ Mail& mail(int kind) {
    __shared__ Mail boxes[8];
    return boxes[kind];
  }
  // A cut by number comes to pass once at most, and so does one by mass.
  static __device__ __forceinline__ Mail& range_mail() { return mail(7); }
  template <class M>
  static __device__ __forceinline__ Mail& bin_mail() { return mail(sizeof(typename M::Sum) == sizeof(unsigned) ? 3 : 5); }
  template <class M>
  static __device__ __forceinline__ Mail& few_mail() { return mail(sizeof(typename M::Sum) == sizeof(unsigned) ? 4 : 6); }

  // Of the parts' greatest logits, the one that is proposed.
  static __device__ __forceinline__ unsigned& nth_greatest() {
    __shared__ unsigned key;
    return key;
  }

  // What the members have found in the pass: the greatest, the sum of weights, and how many elements.
  static __device__ __forceinline__ uint4* heard() {
    __shared__ uint4 said[C];
    return said;
  }

  // Of the pass: each warp's sum of weights.
  static __device__ __forceinline__ float* warp_sums() {
    __shared__ float sums[kWarps];
    return sums;
  }
  // By a whole warp: the block's.
  static __device__ __forceinline__ float sum_of_warps() {
    return warp_reduce<kWarps>(warp_sums()[threadIdx.x % kWarps], AddSums());
  }

  // Of a thread's weights, at least: finite where there is nothing but -inf.
  static constexpr float kLeastOrigin = -1e30f;

  // Whether all members are known to have read what they read of others, and of the row before it is written.
  static __device__ __forceinline__ bool& settled() {
    __shared__ bool are;
    return are;
  }

  // How many elements the pass has noted.
  static __device__ __forceinline__ unsigned& noted() {
    __shared__ unsigned slots;
    return slots;
  }

  // A warp's part of the row.
  static __device__ __forceinline__ Mail& part_mail() {
    __shared__ Mail boxes[kWarps];
    return boxes[threadIdx.x / 32];
  }
  static __device__ __forceinline__ uint4 raw(const Vector<T>& v) {
    uint4 raw;
    memcpy(&raw, &v, sizeof(raw));
    return raw;
  }

  __device__ __forceinline__ long long row_index() const { return index; }

  __device__ __forceinline__ bool holds(float x, int position) const {
    return holds(cut_key, cut_end, x, position);
  }
  static __device__ __forceinline__ bool holds(unsigned cut_key, unsigned cut_end, float x, int position) {
    const unsigned key = key_of(x);
    return key > cut_key || (key == cut_key && (unsigned)position < cut_end);
  }

  // Whether shared memory holds the whole kept set.
  __device__ bool on_chip() const {
    return high == ~0u && (cut_end ? cut_key >= low : cut_key + 1 >= low);
  }

  // The last of every member.
  __device__ __forceinline__ void leave() const {
    if (C > 1 && (reads || !members)) Team<C>::sync();
  }

  // Passes over the slice that few rows need. By themselves, with nothing by reference: what is
  // inlined here takes registers from all rows, and time from the driver, which compiles it.
  struct Measures {
    Mass mass;
    unsigned count;
  };
  static __device__ __noinline__ Measures measure_kept(const TeamRow row, const Softmax softmax,
                                                       unsigned cut_key, unsigned cut_end) {
    Measures all = {{0, 0}, 0};
    row.for_each([&](float x, int position) {
      if (holds(cut_key, cut_end, x, position)) all.mass = all.mass + Mass{softmax.mass(x), 0}, all.count++;
    });
    return all;
  }
  static __device__ __noinline__ Mass slice_mass_above(const TeamRow row, const Softmax softmax, unsigned key) {
    Mass sum = {0, 0};
    row.for_each([&](float x, int) {
      if (key_of(x) > key) sum = sum + Mass{softmax.mass(x), 0};
    });
    return sum;
  }
  // The same where it may be much, and what calls it has registers to spare.
  static __device__ __noinline__ Mass much_mass_above(const TeamRow row, const Softmax softmax, unsigned key) {
    Mass sum = {0, 0};
    by_exponents(softmax, ((row.end - row.begin) / kThreads + 1) * Row<T>::kWidth, [&](auto way) {
      const Weights<way.kWay> weights(softmax);
      typename Weights<way.kWay>::Sum own;
      row.for_each([&](float x, int) { own.add(weights.of(x, key_of(x) > key)); });
      sum = own.mass();
    });
    return sum;
  }
  template <class M>
  static __device__ __noinline__ void tally_slice(const TeamRow row, const Softmax softmax, Histogram* histogram,
                                                  unsigned from, unsigned to, int shift) {
    row.for_each([&](float x, int) {
      const unsigned key = key_of(x);
      if (key >= from && key <= to) tally<M>(softmax, histogram, (key - from) >> shift, key);
    });
  }
  static __device__ __noinline__ void gather_slice(const TeamRow row, unsigned from, unsigned to, Elements* slice,
                                                   unsigned* slots) {
    row.for_each([&](float x, int i) {
      const unsigned key = key_of(x);
      if (key >= from && key <= to) push(key, i, slice, slots);
    });
  }

  // By a whole warp, exactly.
  __device__ __forceinline__ Mass mass_of_members() const {
    Mass own = {0, 0};
#pragma unroll
    for (int i = 0; i < kTopEach; i++) {
      const unsigned rank = threadIdx.x % 32 + i * 32;
      if (rank < members) own = own + Mass{shared.top.mass(shared.top.by_rank[rank]), 0};
    }
    return warp_sum(own);
  }

  // The number and the mass of the kept elements.
  __device__ void count_and_mass(unsigned* count, Mass* mass) const {
    Mass sum = {0, 0};
    unsigned own = 0;
    if (members) {
      *count = members;
      *mass = mass_of_members();
    } else if (on_chip()) {
#pragma unroll 1
      for (int i = threadIdx.x; i < gathered; i += kThreads) {
        const unsigned key = shared.gathered.keys[i];
        if (holds(value_of(key), shared.gathered.positions[i])) {
          sum = sum + measure<Weight>(key), own++;
        }
      }
      *mass = block_sum<Weight>(sum), *count = block_sum<Count>(own);
    } else {
      const Measures slice = measure_kept(row, softmax, cut_key, cut_end);
      *mass = team_combine<C>(block_sum<Weight>(slice.mass), AddSums());
      *count = team_combine<C>(block_sum<Count>(slice.count), AddSums());
    }
  }

 private:
  // Where the copy of the slice is: at the same place in a line as in memory.
  __device__ __forceinline__ uint4* copy_of_slice() const { return reinterpret_cast<uint4*>(&shared + 1) + row.phase(); }

  // Sends for the slice, where all of the row fits on chip. A warp has a part to itself.
  __device__ __forceinline__ bool stage() {
    if constexpr (C > 1) {
      const unsigned bytes = dynamic_shared_bytes();
      const unsigned vectors = row.slice_length(Team<C>::size()) + row.kLine;
      if (sizeof(Shared<C>) + vectors * sizeof(uint4) <= bytes) {
        uint4* const copy = copy_of_slice();
        const int whole = (row.shift + row.size) / Row<T>::kWidth;
        int from, to;
        row.part_of_warp(&from, &to);
        // Those that stick out of the row don't go with the others.
        const int inside = from == 0 && row.shift > 0 ? 1 : from, end = min(to, whole);
        if (threadIdx.x % 32 == 0) {
          part_mail().open();
          const unsigned bytes = max(end - inside, 0) * sizeof(uint4);
          part_mail().expect(bytes);
          if (bytes) part_mail().fetch(copy + (inside - row.begin), row.data + row.first(inside), bytes);
          if (from < inside && from < to) copy[from - row.begin] = raw(row.load_edge(row.data, row.first(from), row.size));
          if (from < to && end < to) copy[end - row.begin] = raw(row.load_edge(row.data, row.first(end), row.size));
        }
        __syncwarp();
        row.staged = copy;
        return true;
      }
    }
    return false;
  }

  // Parts 1 and 2. Whether that is all.
  __device__ __forceinline__ bool find_among_best(int joint, const Proposal& proposal) {
    counted = (limited() || kVariant.truncates == Truncates::kNever) && !proposal.gathers;
    if (counted) {
      forget();
      count_all();
    } else {
      pass(proposal, sums(joint));
      counted = gathered && low <= kNegInfinityKey + 1;
      if (has_nan || has_infinity || best_key <= kNegInfinityKey) count_all(), counted = true;
    }
    cut_key = ~0u, cut_end = 0;
    if (numbers == 0) return true;
    softmax = Softmax(value_of(best_key), limits.temperature);
    return kVariant.searches == Searches::kRanked && gathered && rank_top(joint, proposal.reference);
  }

  // Whether the greatest of so many are found without any gathered.
  __device__ __forceinline__ bool many() const {
    return kBrackets && limited() && limits.top_k > kCandidates / 2 && row.size > kCandidates;
  }
  __device__ __forceinline__ bool limited() const {
    return limits.top_k > 0 && limits.top_k < (unsigned)row.size;
  }

  // All else.
  __device__ __forceinline__ void search(int joint) {
    if (!limited() && !(limits.top_p < 1.0f) && !(limits.min_p > 0.0f)) {
      cut_key = kNegInfinityKey;
      return;
    }
    if constexpr (C > 1) {
      if (!many()) {
        // Read before the members go apart: what outweighed() reads, a member that is ahead writes anew.
        const bool again = proposed.asks_sample || (proposed.first_guess && !outweighed(joint, proposed.reference));
        if (!proposed.asks_sample) set_free();
        if (again) {
          proposed = propose(Sampled(row));
          if (row.staged) proposed.reference = row_best;
          if (find_among_best(joint, proposed)) return;
          set_free();
        }
      }
    }
    unsigned ties = 0;
    const bool ends = many() ? cut_by_count(&ties) : cut_best(&ties);
    if (!ends) cut_further(joint, ties, proposed.reference);
  }

  // Has f(the row's truncation) done by itself, with a copy: what most rows don't need takes no registers from them. By
  // way of shared memory: a stack would have them write to memory, too.
  template <class F>
  static __device__ __noinline__ void do_apart(Kept* to, F f) {
    Kept kept(*to, *reinterpret_cast<Shared<C>*>(dynamic));
    f(kept);
    __syncthreads();
    if (threadIdx.x == 0) to->take(kept);
    __syncthreads();
  }
  template <class F>
  __device__ __forceinline__ void apart(F f) {
    Kept* const copy = published();
    do_apart(copy, f);
    take(*copy);
  }
  __device__ __forceinline__ void take(const Kept& kept) { static_cast<Cut&>(*this) = kept; }

  // The cut of a top-k that is not among the best, and how many elements with its key are kept: 0 where it's exclusive.
  // Whether that ends it.
  __device__ bool cut_best(unsigned* ties) {
    const bool limited = this->limited();
    if (limited && numbers < limits.top_k && !counted) count_all();
    cut_key = kNegInfinityKey;
    if (limits.top_k == 1) {
      if (best_position == ~0u) count_all();
      cut_key = best_key, cut_end = best_position + 1;
      return true;
    }
    if (limited && limits.top_k < max(numbers, gathered + 1u)) {
      const Found<Count> found = locate<Count>(kNegInfinityKey + 1, best_key, 0u, limits.top_k);
      cut_key = found.key, *ties = limits.top_k - found.above;
    }
    return false;
  }

  // What follows a top-k, of whose cut's key `ties` are kept.
  __device__ void cut_further(int joint, unsigned ties, float reference) {
    if (open && (limits.top_p < 1.0f || limits.min_p > 0.0f)) ties = resolve();
    if (limits.top_p < 1.0f) top_p(joint, &ties, reference);
    if (limits.min_p > 0.0f) {
      if (open) ties = resolve();
      min_p(&ties);
    }
    if (!open && ties) {
      cut_end = kVariant.cuts_duplicates ? position_of_tie(ties) : ~0u;
      if (threadIdx.x == 0) settled() = false;
      __syncthreads();
    }
  }

  // The sum of the weights that the pass has not gathered, of all members. By whole warps.
  __device__ __forceinline__ float passed_sum() const {
    if constexpr (C == 1) {
      return sum_of_warps();
    } else {
      const int lane = threadIdx.x % 32;
      const float sum = lane < Team<C>::size() ? __uint_as_float(heard()[lane].y) : 0.0f;
      return __shfl_sync(~0u, warp_reduce<C>(sum, AddSums()), 0);
    }
  }

  // Whether the f32 sum of the rest says at once that the nucleus is far more than what is gathered. It decides the
  // route, never the result.
  __device__ __forceinline__ bool outweighed(int joint, float reference) const {
    if (!kBrackets || !sums(joint) || limits.top_k > 0 || !gathered || low <= kNegInfinityKey + 1) return false;
    const float best = exp2_approx((value_of(best_key) - reference) * scale);
    return limits.top_p * passed_sum() > 1.01f * (1.0f - limits.top_p) * best * gathered;
  }

  // Makes the slices free for another pass.
  __device__ __forceinline__ void set_free() {
    if (threadIdx.x == 0) noted() = 0;
    Team<C>::sync();
    reads = true;
  }

  // Whether the pass sums the weights: where a top-p refers to more than a top-k leaves.
  __device__ bool sums(int joint) const {
    if constexpr (kVariant.searches != Searches::kRanked) return false;  // Nothing refers to them.
    return limits.top_p < 1.0f && limits.top_k != 1 && (joint || !(limits.top_k > 0 && limits.top_k < (unsigned)row.size));
  }

  // The weights of what a thread has of a warp's part.
  __device__ __forceinline__ float sum_staged(const uint4* part, int from, int to, float origin) const {
    constexpr int kDepth = 4;
    Sum sum;
#pragma unroll 1
    for (int j = from + (int)threadIdx.x % 32; j < to; j += kDepth * 32) {
      Vector<T> v[kDepth];
#pragma unroll
      for (int d = 0; d < kDepth; d++) v[d] = TeamRow::as_vector(j + d * 32 < to ? part[j + d * 32] : TeamRow::nothing());
      sum.add(v, CUDART_INF_F, scale, origin);
    }
    return sum.sum;
  }

  // Part 1 where the row is on chip: as the sample's, of parts of the row.
  template <class Meanwhile>
  __device__ __forceinline__ Proposal propose_staged(int joint, Meanwhile meanwhile) {
    constexpr int kGroups = 128;  // at most: 96 where the members are 3 or 6
    alignas(16) __shared__ unsigned maxima[kGroups];
    const int size = Team<C>::size(), lane = threadIdx.x % 32;
    int from, to;
    row.part_of_warp(&from, &to);
    const uint4* const part = row.staged - row.begin;
    float own = -CUDART_INF_F;
    part_mail().wait(0);
#pragma unroll 4
    for (int j = from + lane; j < to; j += 32) own = max_or_nan(own, max_or_nan(TeamRow::as_vector(part[j])));
    own_best = own;
    // NaN is above all.
    unsigned most = own != own ? ~0u : key_of(own);
    // A warp has so many parts, and as many lanes have a part.
    const int log_groups = 5 + 7 - __ffs(kThreads) + 1 - Team<C>::log_size();
    const int groups = 1 << log_groups, lanes = 32 >> log_groups, all_groups = size * kWarps << log_groups;
    if (groups == 1) {
      most = __reduce_max_sync(~0u, most);
    } else {
#pragma unroll 1
      for (int d = lanes >> 1; d > 0; d >>= 1) most = max(most, __shfl_xor_sync(~0u, most, d));
      most = __shfl_sync(~0u, most, (lane & (groups - 1)) * lanes);
    }
    Team<C>::wait();
    if (threadIdx.x == 0) mail(0).expect(sizeof(maxima));
    if (lane < size * groups) {
      const int group = (Team<C>::rank() * kWarps + threadIdx.x / 32) * groups + (lane & (groups - 1));
      mail(0).send(&maxima[group], most, lane >> log_groups);
    }
    // Below every logit's.
    if (threadIdx.x < kGroups - all_groups) mail(0).send(&maxima[all_groups + threadIdx.x], 0, Team<C>::rank());
    // They are on their way.
    meanwhile();
    // The weights, too, relative to the greatest that the thread has seen.
    const float own_origin = fmaxf(own * scale, kLeastOrigin);
    own_sum = sums(joint) ? sum_staged(part, from, to, own_origin) : 0.0f;
    const bool by_count = limits.top_k > 0 && limits.top_k < (unsigned)row.size;
    const bool by_parts = row.size > kCandidates && limits.top_k != 1 &&
                          (by_count ? limits.top_k <= (unsigned)all_groups : limits.top_p < 1.0f);
    // At least k reach the kth greatest. Of 128 parts half have about 90 that do, of 96 seven in twelve.
    const unsigned nth = by_count ? limits.top_k : 32 + all_groups / 4;
    mail(0).wait(0);
    const uint4 four = reinterpret_cast<const uint4*>(maxima)[lane];
    const unsigned best = __reduce_max_sync(~0u, max(max(four.x, four.y), max(four.z, four.w)));
    if (by_parts) {
      // The greatest that nth reach, or one that a few more do: of the lesser of each two, one of which is the least.
      constexpr int kPivots = kGroups / 2, kShare = kThreads / kPivots;
      const uint2 two = reinterpret_cast<const uint2*>(maxima)[threadIdx.x / kShare];
      const unsigned pivot = min(two.x, two.y);
      const uint4* others = reinterpret_cast<const uint4*>(maxima) + threadIdx.x % kShare;
      unsigned below = 0, more_below = 0;
#pragma unroll
      for (int i = 0; i < kGroups / kShare / 4; i++) {
        const uint4 its = others[i * kShare];
        below -= all_if_above(pivot, its.x) + all_if_above(pivot, its.y);
        more_below -= all_if_above(pivot, its.z) + all_if_above(pivot, its.w);
      }
      below += more_below;
#pragma unroll
      for (int d = kShare / 2; d > 0; d /= 2) below += __shfl_xor_sync(~0u, below, d);
      const unsigned most = __reduce_max_sync(~0u, kGroups - below >= nth ? pivot : 0);
      if (lane == 0) atomicMax(&nth_greatest(), most);
      __syncthreads();
    }
    row_best = best == ~0u ? CUDART_NAN_F : value_of(best);
    own_sum *= exp2_approx(own_origin - row_best * scale);  // as rounded as the pass's origin is
    if (best == ~0u) return {0.0f, false, 0.0f, false, false};
    const float reference = row_best;
    const auto above = [&](float threshold, bool guess) {
      return Proposal{fmaxf(threshold, -CUDART_MAX_NORMAL_F), true, reference, guess, false};
    };
    if (by_parts && reference > -CUDART_INF_F) return above(value_of(nth_greatest()), true);
    if (row.size <= kCandidates || reference == -CUDART_INF_F) return above(-CUDART_MAX_NORMAL_F, false);
    if (!by_count && !(limits.top_p < 1.0f)) {
      if (!(limits.min_p > 0.0f)) return {0.0f, false, reference, false, false};
      return above(reference + limits.temperature * (logf(limits.min_p) - 1e-3f), false);
    }
    if (limits.top_k == 1) return above(reference, false);
    return {0.0f, false, reference, false, true};
  }

  // Part 1, the sample.
  __device__ Proposal propose(const Sampled& x) {
    constexpr int kSampled = Sampled::kVectors;
    constexpr int kGroups = 64, kGroup = kThreads / kGroups, kShare = 32 / kGroup;
    __shared__ float maxima[kGroups], nth_greatest[2];
    __shared__ unsigned weights[4][kWarps];
    float best = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < kSampled; i++) {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) best = fmaxf(best, x(i, w));
    }
    const auto greater = [](float a, float b) { return fmaxf(a, b); };
    const float group = warp_reduce<kGroup>(best, greater);
    if (threadIdx.x % kGroup == 0) maxima[threadIdx.x / kGroup] = group;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const float reference = warp_reduce(fmaxf(maxima[lane], maxima[lane + 32]), greater);
    // The nth of the groups' maxima, about the nth of the sample or a little below; another's, too.
    const auto nth_maximum = [&](int nth, int fewer = 0) {
      const int mine = threadIdx.x / 32 * kShare + lane / kGroup;
      int before = 0;
#pragma unroll
      for (int i = 0; i < kGroups / kGroup; i++) {
        const int other = i * kGroup + lane % kGroup;
        before += maxima[other] > maxima[mine] || (maxima[other] == maxima[mine] && other < mine);
      }
#pragma unroll
      for (int lanes = kGroup / 2; lanes > 0; lanes /= 2) before += __shfl_xor_sync(~0u, before, lanes);
      if (lane % kGroup == 0) {
        if (before == nth - 1) nth_greatest[0] = maxima[mine];
        if (before == fewer - 1) nth_greatest[1] = maxima[mine];
      }
      __syncthreads();
      return nth_greatest[0];
    };
    // How many logits one of the sample stands for.
    const float each = (float)row.size * (1.0f / Sampled::kSize), inverse = about_inverse(each);
    const auto above = [&](float threshold) {
      return Proposal{fmaxf(threshold, -CUDART_MAX_NORMAL_F), true, reference, false, false};
    };
    // Everything above -inf fits, or may.
    if (row.size <= kCandidates || reference == -CUDART_INF_F) return above(-CUDART_MAX_NORMAL_F);
    const bool by_count = limits.top_k > 0 && limits.top_k < (unsigned)row.size;
    const bool by_mass = limits.top_p < 1.0f;
    if (!by_count && !by_mass) {
      if (!(limits.min_p > 0.0f)) return {0.0f, false, reference, false, false};
      return above(reference + limits.temperature * (logf(limits.min_p) - 1e-3f));
    }
    if (limits.top_k == 1) return above(reference);
    int nth, fewer = 0;
    if (by_count) {
      // Fewer than k reach it about once in 100,000 rows.
      nth = (int)fminf(2.0f * limits.top_k * inverse + 7.0f, 64.0f);
      if (nth <= 48) return above(nth_maximum(nth));
      if (limits.top_k > kCandidates / 2) return {0.0f, false, reference, false, false};
    } else {
      nth = (int)fminf(fmaxf(768.0f * inverse, 4.0f), 40.0f), fewer = max(nth / 2, 6);
    }

    // What lies far below weighs nothing, and fill values would drown the deviation.
    const float floor = reference - 128.0f * fmaxf(limits.temperature, 1.0f);
    const float threshold = by_count ? CUDART_INF_F : nth_maximum(nth, fewer);
    if (!by_count) {
      // Weights of all, and of what is not gathered above each threshold, as integers: a warp adds them by one
      // instruction each, and no order shows.
      constexpr float kUnit = 0x1p31f / (Sampled::kSize / kWarps);
      float own[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      // One that even a few more at it than the sample shows would not reach, of what a top-p spares; as if what the sample
      // shows above it were all there is.
      const float least = 0.25f / 7.0f * (1.0f - limits.top_p) * inverse;
      const float thresholds[3] = {threshold, nth_greatest[1], reference + __log2f(least) * (0.6931472f * limits.temperature)};
#pragma unroll
      for (int i = 0; i < kSampled; i++) {
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) {
          const float weight = exp2_approx((x(i, w) - reference) * scale);
#pragma unroll
          for (int t = 0; t < 3; t++) add_below(&own[t], weight, x(i, w), thresholds[t]);
          own[3] += weight;
        }
      }
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const unsigned sum = __reduce_add_sync(~0u, __float2uint_rz(own[t] * kUnit));
        if (lane == 0) weights[t][threadIdx.x / 32] = sum / kWarps;
      }
      __syncthreads();
      const auto sum = [&](int which) { return (float)__reduce_add_sync(~0u, lane < kWarps ? weights[which][lane] : 0); };
      // Fewer are gathered where there is little doubt.
      const float spared = (1.0f - limits.top_p) * sum(3);
      if (thresholds[2] > thresholds[1] && each * sum(2) < 0.5f * spared) return above(thresholds[2]);
      if (sum(1) < 0.3f * spared) return above(thresholds[1]);
      // Where far more is left, it is not to be gathered either: greater logits that the sample has missed may still
      // outweigh it.
      const float rest = sum(0);
      if (rest < 0.8f * spared || rest > 2.0f * spared) return above(threshold);
    }
    // Moments about the best: one pass, and no cancellation to speak of.
    Moments m = {0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSampled; i++) {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        const float d = x(i, w) - reference;
        if (x(i, w) > floor && x(i, w) < CUDART_INF_F) m.n += 1.0f, m.sum += d, m.squares += d * d;
      }
    }
    const Normal normal = normal_threshold(m, each, by_count ? (float)limits.top_k : 0.0f, limits.top_p, limits.temperature);
    // No statistics (no number in the sample, infinite ones): nothing is gathered.
    if (normal.more_than_fit) return above(threshold);
    if (!(reference + normal.threshold > -CUDART_INF_F)) return {0.0f, false, reference, false, false};
    return above(fminf(reference + normal.threshold, reference));
  }

  struct Moments {
    float n, sum, squares;
  };
  // What a normal law of these moments says: a threshold, by its distance from what they are about; and whether more are
  // kept than fit. Few rows need it, so it is by itself.
  struct Normal {
    float threshold;
    bool more_than_fit;
  };
  static __device__ __noinline__ Normal normal_threshold(Moments m, float each, float top_k, float top_p,
                                                         float temperature) {
    __shared__ Normal said;
    m = block_reduce(m, [](Moments a, Moments b) {
      return Moments{a.n + b.n, a.sum + b.sum, a.squares + b.squares};
    });
    // One warp has the rest to itself, and inverts the law for all at once.
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      const float mean = m.sum / m.n;
      const float sigma = sqrtf(fmaxf(m.squares / m.n - mean * mean, 0.0f));
      // The deviations that about so many elements exceed.
      const float count = lane == 0 ? 0.5f * (top_k + kCandidates) : top_k > 0.0f ? top_k : kCandidates;
      const float deviation = -normcdfinvf(lane == 2 ? top_p : fminf(count / (m.n * each), 0.5f));
      const float least = __shfl_sync(~0u, deviation, 0), of_all = __shfl_sync(~0u, deviation, 1);
      const float of_top_p = __shfl_sync(~0u, deviation, 2);
      float delta = 0.8f * of_all;  // the paper's margin
      if (top_k == 0.0f) {
        // Under softmax a normal law is a normal law about its mean plus sigma squared.
        delta = sigma / temperature + of_top_p;
        delta -= 0.2f * fabsf(delta);
      }
      // Where more are kept than fit, by this law: greater logits that the sample has missed may still outweigh it.
      if (lane == 0) said = {mean + fmaxf(delta, least) * sigma, top_k == 0.0f && delta < of_all};
    }
    __syncthreads();
    return said;
  }

  struct Part {
    float best;
    // The weights of what is not gathered.
    float sum;
  };

  // Notes the elements of a tile that are above. Where there is no room they are only counted. Most have one: to store each
  // under a condition of its own takes more instructions than to look for it.
  template <int kDepth>
  static __device__ __forceinline__ void note(const Vector<T>(&v)[kDepth], int first, T below, Elements* slice,
                                              unsigned* slots) {
    constexpr int kWidth = Row<T>::kWidth, kPerWord = 4 / sizeof(T);
    static_assert(4 * kDepth * kPerWord <= 32, "a bit for each");
    unsigned words[4 * kDepth], reach = 0;
    memcpy(words, v, sizeof(words));
#pragma unroll
    for (int i = 0; i < 4 * kDepth; i++) {
      if constexpr (kPerWord == 1) {
        reach = reach >> 1 | (sign_above(below, __uint_as_float(words[i])) & 0x80000000u);
      } else {
        typedef decltype(pair(T(), T())) Pair;
        Pair two;
        memcpy(&two, &words[i], sizeof(two));
        reach = reach >> 1 | (signs_above(pair(below, below), two) & 0x80008000u);
      }
    }
    // The first word's is the lowest bit, of the upper elements, if there are two, 16 beyond it.
    constexpr unsigned kFirst = (kPerWord == 1 ? 32 : 16) - 4 * kDepth;
    const unsigned count = __popc(reach);
    if (count == 0) return;
    unsigned slot = shared_add(slots, count);
    if (slot + count > kCandidates) return;
#pragma unroll 1
    for (; reach; reach &= reach - 1, slot++) {
      const unsigned bit = __ffs(reach) - 1, i = bit % (32 / kPerWord) - kFirst;
      // A choice by halves, so that all stays in registers.
      unsigned some[4 * kDepth];
#pragma unroll
      for (int n = 0; n < 4 * kDepth; n++) some[n] = words[n];
#pragma unroll
      for (int step = 1; step < 4 * kDepth; step *= 2) {
#pragma unroll
        for (int n = 0; n + step < 4 * kDepth; n += 2 * step) some[n] = i & step ? some[n + step] : some[n];
      }
      const bool upper = kPerWord == 2 && bit >= 16;
      const T x = from_bits<T>(kPerWord == 1 ? some[0] : upper ? some[0] >> 16 : some[0] & 0xffff);
      slice->keys[slot] = key_of(widen(x));
      slice->positions[slot] = first + i / 4 * (kThreads * kWidth) + i % 4 * kPerWord + upper;
    }
  }

  // A f32 sum of the weights below a threshold: 2^(x scale - origin).
  struct Sum {
    float sum = 0.0f, carry = 0.0f;

    template <int kDepth>
    __device__ __forceinline__ void add(const Vector<T>(&v)[kDepth], float threshold, float scale, float origin) {
      float weights[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) {
          const float x = widen(v[d].at[w]);
          const float weight = exp2_approx(__fmaf_rn(x, scale, -origin));
          add_below(&weights[w % 4], weight, x, threshold);
        }
      }
      // With the rounding of each sum carried into the next (Kahan).
      const float more = (weights[0] + weights[1]) + (weights[2] + weights[3]) - carry;
      const float next = sum + more;
      carry = (next - sum) - more, sum = next;
    }
  };

  // A thread's part of the pass. By itself, with nothing by reference, so that the loop has all
  // registers and its vectors never go through memory.
  template <bool kSums>
  static __device__ __noinline__ Part scan_slice(const Row<T> row, float threshold, float scale, float origin,
                                                 Elements* slice, unsigned* slots) {
    Part part = {-CUDART_INF_F, 0.0f};
    Sum sum;
    const T below = below_of<T>(threshold);
    // Of half precision, whose sums need more registers, as many as stay out of local memory.
    constexpr int kDepth = kSums && kLight == 4 && sizeof(T) == 2 ? 3 : kLight;
    row.template for_each_tile<kDepth>([&](const Vector<T>(&v)[kDepth], int j) {
      float most = max_or_nan(v[0]);
#pragma unroll
      for (int d = 1; d < kDepth; d++) most = max_or_nan(most, max_or_nan(v[d]));
      part.best = max_or_nan(part.best, most);
      if constexpr (kSums) sum.add(v, threshold, scale, origin);
      // NaN hides what is beside it: then the row is looked at again. A full buffer takes no more.
      if (most >= threshold && *(volatile unsigned*)slots <= kCandidates) note(v, row.first(j), below, slice, slots);
    });
    part.sum = sum.sum;
    int at;
    if (row.has_edge(&at)) part = scan_edge(row, at, part, threshold, scale, origin, slice, slots);
    return part;
  }

  static __device__ __noinline__ Part scan_edge(const Row<T> row, int at, Part part, float threshold, float scale,
                                                float origin, Elements* slice, unsigned* slots) {
    const Vector<T> v[1] = {row.load(at)};
    Sum sum;
    sum.add(v, threshold, scale, origin);
    note(v, row.first(at), below_of<T>(threshold), slice, slots);
    part.best = max_or_nan(part.best, max_or_nan(v[0])), part.sum += sum.sum;
    return part;
  }

  // The same where the slice is on chip. What the few threads have that have seen something great, the
  // whole warp looks at, four threads' at a time.
  __device__ __forceinline__ Part scan_staged(float threshold, float origin, bool sums_weights, unsigned* slots) {
    const int lane = threadIdx.x % 32;
    int from, to;
    row.part_of_warp(&from, &to);
    const uint4* const part = row.staged - row.begin;
    // The others' sums are of all that they have seen.
    Sum sum;
    if (!(own_best >= threshold)) sum.sum = own_sum;
    // The greatest number below the threshold, no zero below a zero: what is above it reaches that.
    const float below = below_of<float>(threshold);
    constexpr int kAtOnce = 4, kLanes = 32 / kAtOnce;
    unsigned hits = __ballot_sync(~0u, own_best >= threshold);
#pragma unroll 1
    while (hits) {
      unsigned from_whose = hits;
#pragma unroll
      for (int i = 1; i < kAtOnce; i++) {
        if (lane >= i * kLanes) from_whose &= from_whose - 1;
        hits &= hits - 1;
      }
      hits &= hits - 1;
      if (from_whose) {
        constexpr int kDepth = 2, kApart = 32 * kLanes;
#pragma unroll 1
        for (int j = from + __ffs(from_whose) - 1 + lane % kLanes * 32; j < to; j += kDepth * kApart) {
          Vector<T> v[kDepth];
#pragma unroll
          for (int d = 0; d < kDepth; d++) v[d] = TeamRow::as_vector(j + d * kApart < to ? part[j + d * kApart] : TeamRow::nothing());
          // A bit for each that reaches it, without a condition; then a few find theirs again.
          unsigned reach = 0;
#pragma unroll
          for (int d = 0; d < kDepth; d++) {
#pragma unroll
            for (int w = 0; w < Row<T>::kWidth; w++) {
              reach = __funnelshift_l(sign_above(below, widen(v[d].at[w])), reach, 1);
            }
          }
          if (reach) {
            const unsigned count = __popc(reach);
            unsigned slot = shared_add(slots, count);
            // Where there is no room they are only counted.
            if (slot + count <= kCandidates) {
#pragma unroll 1
              for (; reach; reach &= reach - 1, slot++) {
                constexpr unsigned kWidth = Row<T>::kWidth, kLast = kDepth * kWidth - 1;
                const unsigned i = kLast + 1 - __ffs(reach), at = j + i / kWidth * kApart;
                const T x = reinterpret_cast<const T*>(part + at)[i % kWidth];
                shared.slice.keys[slot] = key_of(widen(x)), shared.slice.positions[slot] = row.first(at) + i % kWidth;
              }
            }
          }
          if (sums_weights) sum.add(v, threshold, scale, origin);
        }
      }
      __syncwarp();
      // A full buffer takes no more: all lanes must have seen it so.
      if (hits && __any_sync(~0u, *(volatile unsigned*)slots > kCandidates)) break;
    }
    return {own_best, sum.sum};
  }

  // Part 1, the pass: the maximum, the elements that reach the threshold, and the f32 sum of the
  // others' weights relative to the reference. What is rare (NaN, +inf) is only noticed.
  __device__ void pass(const Proposal& proposal, bool sums_weights) {
    __shared__ unsigned bests[kWarps];
    on_top = false;
    // Ordered by the barrier before what is gathered is looked at.
    if (threadIdx.x < kTopBins) shared.top.bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.top.slots = 0;
    count_pass();

    const float threshold = proposal.gathers ? proposal.threshold : CUDART_INF_F;
    const float origin = proposal.reference * scale;
    Part part;
    // Of what is on chip the greatest is known.
    const bool known = C > 1 && row.staged;
    if (known) {
      part = scan_staged(threshold, origin, sums_weights, &noted());
    } else {
      Row<T> streamed(row.data, row.size, 0, 1);
      streamed.begin = row.begin, streamed.end = row.end;
      part = sums_weights
          ? scan_slice<true>(streamed, threshold, scale, origin, &shared.slice, &noted())
          : scan_slice<false>(streamed, threshold, 0.0f, 0.0f, &shared.slice, &noted());
    }
    if (sums_weights) part.sum = warp_reduce(part.sum, AddSums());
    if (!known) {
      // NaN is above all.
      const unsigned best = __reduce_max_sync(~0u, part.best != part.best ? ~0u : key_of(part.best));
      if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    }
    if (sums_weights && threadIdx.x % 32 == 0) warp_sums()[threadIdx.x / 32] = part.sum;
    __syncthreads();
    unsigned total = noted();
    if (!known) {
      const unsigned best = __reduce_max_sync(~0u, threadIdx.x % 32 < kWarps ? bests[threadIdx.x % 32] : 0);
      part.best = best == ~0u ? CUDART_NAN_F : value_of(best);
    }
    // Where the sum is not the slice's alone, and is needed later.
    if (C > 1 && sums_weights && threadIdx.x < 32) part.sum = sum_of_warps();
    if constexpr (C > 1) {
      // Each tells all what it has found, with the first few elements. Where all are few, nothing more
      // is sent.
      constexpr unsigned kFew = 32;
      __shared__ u64 few[C][kFew];
      const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const unsigned size = Team<C>::size(), rank = Team<C>::rank();
      if (threadIdx.x == 0) mail(1).expect(size * (sizeof(uint4) + sizeof(few[0])));
      if (threadIdx.x < size) {
        const uint4 said = {__float_as_uint(part.best), __float_as_uint(part.sum), total, 0};
        mail(1).send(&heard()[rank], said, threadIdx.x);
      }
      static_assert(kWarps >= C, "a warp sends to each");
      if (warp < size) {
        const u64 element = (u64)shared.slice.keys[lane] << 32 | ~shared.slice.positions[lane];
        mail(1).send(&few[rank][lane], element, warp);
      }
      mail(1).wait(rounds++);
      const uint4 said = lane < size ? heard()[lane] : uint4{__float_as_uint(-CUDART_INF_F), 0, 0, 0};
      // The sum is combined where it is needed.
      part.best = known ? row_best : __shfl_sync(~0u, warp_reduce<C>(__uint_as_float(said.x), [](float a, float b) {
        return max_or_nan(a, b);
      }), 0);
      total = __reduce_add_sync(~0u, said.z);
      if (__reduce_max_sync(~0u, said.z) <= kFew) {
        const unsigned place = __reduce_add_sync(~0u, lane < warp ? said.z : 0) + lane;
        on_top = total <= kTop;
        if (warp < size && lane < __shfl_sync(~0u, said.z, warp)) {
          const u64 element = few[warp][lane];
          shared.gathered.keys[place] = element >> 32, shared.gathered.positions[place] = ~(unsigned)element;
          if (on_top) shared.top.orders[place] = element;
        }
        // The next one belongs to the comparisons by twos.
        if (on_top && threadIdx.x == kThreads - 1 && total < kTop) shared.top.orders[total] = kNoOrder;
        __syncthreads();
      } else if (total <= kCandidates) {
        if (threadIdx.x == 0) mail(2).expect(total * 2 * sizeof(unsigned));
        const unsigned place = __reduce_add_sync(~0u, lane < rank ? said.z : 0);
        const unsigned count = __shfl_sync(~0u, said.z, rank);
        // As many warps as there can be send to each.
        const unsigned log_senders = __ffs(kWarps) - 1 - Team<C>::log_size(), to = warp >> log_senders;
        const unsigned sender = warp & ((1 << log_senders) - 1);
#pragma unroll 1
        for (unsigned i = sender * 32 + lane; to < size && i < count; i += 32 << log_senders) {
          mail(2).send(&shared.gathered.keys[place + i], shared.slice.keys[i], to);
          mail(2).send(&shared.gathered.positions[place + i], shared.slice.positions[i], to);
        }
        mail(2).wait(sendings++);
      }
    }
    if (threadIdx.x == 0) route_counters().gathered = total;
    if (proposal.gathers && total <= kCandidates && kVariant.truncates != Truncates::kMisses) {
      gathered = total, low = key_of(threshold), high = ~0u;
    } else {
      forget();
    }
    has_nan = part.best != part.best, has_infinity = part.best == CUDART_INF_F;
    if (has_nan) forget();
    best_key = key_of(part.best), best_position = ~0u;
    numbers = gathered;
    if (numbers == 0 && best_key > kNegInfinityKey) numbers = 1;
  }

  // Counts what is above -inf, and finds the first of the greatest: for rows with few numbers, NaN or
  // infinities, and where nothing was gathered.
  __device__ void count_all() {
    reads = true;
    float best = -CUDART_INF_F;
    int position = 0;
    unsigned above = 0, flags = 0;
    count_pass();
    row.for_each([&](float x, int i) {
      if (x > best || (x == best && i < position)) best = x, position = i;
      above += x > -CUDART_INF_F;
      flags |= x != x;
    });
    struct Summary {
      u64 rank;
      unsigned numbers, flags;
    } summary = {(u64)key_of(best) << 32 | ~(unsigned)position, above, flags};
    summary = team_reduce<C>(summary, [](Summary a, Summary b) {
      return Summary{max(a.rank, b.rank), a.numbers + b.numbers, a.flags | b.flags};
    });
    best_key = summary.rank >> 32, best_position = ~(unsigned)summary.rank;
    numbers = summary.numbers;
    has_nan = summary.flags, has_infinity = numbers > 0 && value_of(best_key) == CUDART_INF_F;
  }

  // Part 2: the cut, where it lies among the best kTop. The pass's weights are relative to `reference`. What takes no
  // more than one warp, one warp does.
  __device__ bool rank_top(int joint, float reference) {
    // Comparisons of half as many are a quarter, and they hold most sets of a top-p.
    unsigned room = C == 1 && limits.top_k == 0 ? kTop / 2 : kTop;
    for (bool again = false; !rank_best(room, again, joint, reference); again = true) {
      if (room == kTop || gathered <= kTop || outweighed(joint, reference)) return false;
      room = kTop;
    }
    return true;
  }

  // The same of the best `room` alone, where more than kTop are gathered.
  __device__ __forceinline__ bool rank_best(unsigned room, bool again, int joint, float reference) {
    Top& top = shared.top;
    __shared__ unsigned admitted, admitted_from;
    __shared__ Verdict verdict;
    __shared__ Rest rest;
    const bool whole_row = low <= kNegInfinityKey + 1;
    unsigned count = gathered, edge = low;
    if (count > kTop) {
      if (again) {
        __syncthreads();
        if (threadIdx.x < kTopBins) top.bins[threadIdx.x] = 0;
        if (threadIdx.x == 0) top.slots = 0;
        __syncthreads();
      }
      const unsigned range = best_key - low;
      const int shift = max(0, 24 - __clz(range | 1));
#pragma unroll 1
      for (int i = threadIdx.x; i < gathered; i += kThreads) {
        atomicAdd(&top.bins[(shared.gathered.keys[i] - low) >> shift], 1u);
      }
      __syncthreads();
      // How many bins from the top hold no more than there is room for, or the first k.
      if (threadIdx.x < 32) {
        constexpr int kEach = kTopBins / 32;
        const int lane = threadIdx.x;
        unsigned counts[kEach], inclusive = 0;
#pragma unroll
        for (int b = 0; b < kEach; b++) {
          counts[b] = top.bins[kTopBins - 1 - (lane * kEach + b)], inclusive += counts[b];
        }
        const unsigned own = inclusive;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
          const unsigned below = __shfl_up_sync(~0u, inclusive, lanes);
          if (lane >= lanes) inclusive += below;
        }
        const unsigned enough = limits.top_k > 0 ? min(limits.top_k, room) : room;
        unsigned running = inclusive - own, fitting = 0, bins = 0;
#pragma unroll
        for (int b = 0; b < kEach; b++) {
          const bool wanted = running < enough;
          running += counts[b];
          if (wanted && running <= room) bins++, fitting = running;
        }
        bins = __reduce_add_sync(~0u, bins), fitting = __reduce_max_sync(~0u, fitting);
        if (lane == 0) admitted = fitting, admitted_from = low + ((kTopBins - bins) << shift);
      }
      __syncthreads();
      count = admitted, edge = admitted_from;
      if (count == 0) return false;
    }
    const bool limited = limits.top_k > 0 && limits.top_k < (unsigned)row.size;
    const bool complete = whole_row && count == gathered;
    if (limited && limits.top_k > count && !complete) return false;
    // The mass of what is gathered and not ranked, where it matters.
    const bool refers = sums(joint) && count < gathered;
    if (!on_top) {
      float others = 0.0f;
      const float origin = reference * scale;
#pragma unroll 1
      for (int i = threadIdx.x; i < gathered; i += kThreads) {
        const unsigned key = shared.gathered.keys[i];
        if (key >= edge) {
          const unsigned slot = count == gathered ? i : atomicAdd(&top.slots, 1u);
          top.orders[slot] = (u64)key << 32 | ~shared.gathered.positions[i];
        } else if (refers) {
          others += exp2_approx(__fmaf_rn(value_of(key), scale, -origin));
        }
      }
      // The next one belongs to the comparisons by twos.
      if (threadIdx.x == kThreads - 1 && count < kTop) top.orders[count] = kNoOrder;
      if (refers) {
        others = warp_reduce(others, AddSums());
        if (threadIdx.x % 32 == 0) top.others[threadIdx.x / 32] = others;
      }
      __syncthreads();
    }
    ranked = count;
    count_step();
    const bool by_mass = limits.top_p < 1.0f && limits.top_k != 1, of_ranked = complete || (limited && !joint);
    // What a top-p is a fraction of, if not of the ranked, and their masses: by warps that have the fewest comparisons to
    // make.
    constexpr int kWeighs = kTop / 32, kBounds = kWarps - kWeighs - 1;
    if (by_mass && !of_ranked && threadIdx.x / 32 == kBounds) {
      const int lane = threadIdx.x % 32;
      const float others = warp_reduce(refers && lane < kWarps ? top.others[lane] : 0.0f, AddSums());
      rest = bound(passed_sum() + others, reference);
    }
    if (threadIdx.x / 32 > kBounds && threadIdx.x % kTop < count) {
      const unsigned element = threadIdx.x % kTop;
      top.weights[element] = softmax.weight(value_of(top.orders[element] >> 32));
    }
    rank_orders(top, count, by_id);
    __syncthreads();
    if (!(limits.top_p < 1.0f) && !(limits.min_p > 0.0f) && limited) {
      members = min(limits.top_k, count);
    } else {
      const unsigned most = limited ? min(limits.top_k, count) : count;
      const unsigned of = limited && !joint ? most : count;
      if (threadIdx.x < 32) decide(&verdict, count, most, limited || complete, by_mass, of, of_ranked, rest);
      __syncthreads();
      if (verdict.wants_exact) {
        __shared__ Mass exact;
        Mass all = {0, 0};
        if (!of_ranked) all = mass_above(kNegInfinityKey);
        if (threadIdx.x == 0) exact = all;
        __syncthreads();
        if (threadIdx.x < 32) {
          bool closed = limited || complete;
          unsigned kept = min(most, exact_ends(top, count, of, closed, &exact, limits.top_p));
          closed |= kept > 0;
          if (limits.min_p > 0.0f && kept > 1) cut_by_min_p(count, &kept, &closed);
          if (threadIdx.x == 0) verdict = {kept, closed && kept > 0, false};
        }
        __syncthreads();
      }
      if (!verdict.closed) return false;
      members = verdict.kept;
    }
    const u64 last = top.ranked(members - 1);
    cut_key = last >> 32, cut_end = ~(unsigned)last + 1;
    best_position = ~(unsigned)top.ranked(0);
    return true;
  }

  // Of the ranked the first `kept` are; `closed` where that holds whatever lies below the edge.
  struct Verdict {
    unsigned kept;
    bool closed, wants_exact;
  };

  // What the sum of the weights of what is not ranked lies in, if anything is known of it.
  struct Rest {
    double least, most;
    bool known;
  };

  // By one warp: `most` may be kept of the ranked. A top-p refers to the first `of` of the ranked, and unless they are
  // all (`of_ranked`), to the rest, too.
  __device__ __forceinline__ void decide(Verdict* verdict, unsigned count, unsigned most, bool closed, bool by_mass,
                                         unsigned of, bool of_ranked, const Rest& rest) const {
    Verdict its = {most, closed, false};
    if (by_mass) {
      its = ends_of_nucleus<float>(shared.top, of, most, closed, limits.top_p, of_ranked, rest);
      if (its.wants_exact) its = better_ends_of_nucleus(shared.top, of, most, closed, limits.top_p, of_ranked, rest);
    }
    if (limits.min_p > 0.0f && its.kept > 1 && !its.wants_exact) cut_by_min_p(count, &its.kept, &its.closed);
    if (threadIdx.x == 0) *verdict = {its.kept, its.closed && its.kept > 0, its.wants_exact};
  }

  // Few instructions matter more than few at a time: their latencies add up.
  template <class N>
  static __device__ __forceinline__ Verdict ends_of_nucleus(const Top& top, unsigned of, unsigned most, bool closed,
                                                            float top_p, bool of_ranked, const Rest& rest) {
    constexpr N kMost = Rounding<N>::kMost;
    if (!of_ranked && !rest.known) return {most, closed, true};
    const unsigned first = threadIdx.x % 32 * kTopEach;
    const uchar4 four = reinterpret_cast<const uchar4*>(top.by_rank)[threadIdx.x % 32];
    const unsigned elements[kTopEach] = {four.x, four.y, four.z, four.w};
    N weights[kTopEach], sum = 0, total;
#pragma unroll
    for (int i = 0; i < kTopEach; i++) {
      weights[i] = first + i < of ? Rounding<N>::round(top.weights[elements[i]]) : N(0), sum += weights[i];
    }
    N above = exclusive_sum(sum, &total), whole = total, least_whole = total;
    if (!of_ranked) {
      whole = total + (N)rest.most, least_whole = total + (N)rest.least;
    }
    const N target = top_p * whole * (N(1) + kMost), least = top_p * least_whole * (N(1) - kMost);
    // How many of the ranked begin before it.
    unsigned ends = 0;
#pragma unroll
    for (int i = 0; i < kTopEach; i++) {
      if (first + i < of) ends += (above < target) + ((above < least) << 16);
      above += weights[i];
    }
    ends = __reduce_add_sync(~0u, ends);
    // Beyond the edge, or so close to it that only the exact sum tells.
    if (!closed && total < target) return {0, false, false};
    const unsigned kept = min(most, ends & 0xffff);
    return {kept, true, kept != min(most, ends >> 16)};
  }
  static __device__ __noinline__ Verdict better_ends_of_nucleus(const Top& top, unsigned of, unsigned most, bool closed,
                                                                float top_p, bool of_ranked, const Rest& rest) {
    return ends_of_nucleus<double>(top, of, most, closed, top_p, of_ranked, rest);
  }

  // By one warp.
  __device__ __forceinline__ void cut_by_min_p(unsigned count, unsigned* kept, bool* closed) const {
    const unsigned ends = reaching_min_p(shared.top, count, limits.min_p, softmax);
    *closed |= ends < count;
    *kept = min(*kept, ends);
  }
  static __device__ __noinline__ unsigned reaching_min_p(const Top& top, unsigned count, float min_p,
                                                         const Softmax softmax) {
    const double bound = log((double)min_p);
    unsigned ends = 0;
#pragma unroll 1
    for (unsigned at = threadIdx.x % 32; at < count; at += 32) {
      ends += (double)softmax.exponent(value_of(top.ranked(at) >> 32)) >= bound;
    }
    return __reduce_add_sync(~0u, ends);
  }

  // How many of the ranked begin before the nucleus ends, by exact sums: of `all`, or where that is 0 of the first
  // `of`. None where the ranked are less than it, and are not all. By one warp.
  static __device__ __noinline__ unsigned exact_ends(const Top& top, unsigned count, unsigned of, bool closed,
                                                     const Mass* all, float top_p) {
    Mass sum = {0, 0}, whole = *all;
    if ((whole.low | whole.high) == 0) {
#pragma unroll 1
      for (unsigned i = 0; i < of; i++) whole = whole + Mass{top.mass(top.by_rank[i]), 0};
    }
    const Mass target = nucleus(top_p, whole);
    unsigned ends = 0;
#pragma unroll 1
    for (; ends < count && sum < target; ends++) sum = sum + Mass{top.mass(top.by_rank[ends]), 0};
    return closed || !(sum < target) ? ends : 0;
  }

  // What the exact sum of the weights that are not ranked lies in, or of those that are not gathered: from the f32 sum
  // relative to the reference, of the pass and of what is gathered and not ranked.
  // Not known where there is no bound.
  //
  // The pass's weights are 2^(x scale - origin) with one rounding of the exponent, whatever the product
  // that the origin is rounded from: it is the same number here. A thread's sum that has another origin is brought
  // to this one.
  //
  // In units of the last place (2^-24), relative: an exponent of the f32 sum is off by at most 4 times
  // itself, one of the exact weights by 2. None in the rest is above 0, so the weights times their
  // exponents come to at most the sum times log2(size / sum): the entropy of `size` equal ones. A
  // weight is off by 4 in the one sum and in the other, and a carried sum, with those that it is of and the
  // tree that joins the threads', by 30, as is the sum of what is gathered; how far the origin is below the maximum adds 6
  // times that, and 8. What is gathered may be above the origin, by no more than the maximum is: its exponents, counted from
  // the maximum, are off by 4 times themselves and twice that, which is within it. The sum of a thread may have an origin of
  // its own, not below any of its logits, and be brought to the greatest's: exponents that add up are off by what their sum
  // is, and the factor and the product by 6. The rest is slack. Besides, each exact weight is rounded down to a unit.
  __device__ __forceinline__ Rest bound(float sum, float reference) const {
    const Rest unknown = {0.0, 0.0, false};
    const float max = value_of(best_key);
    const float origin = reference * scale, octaves = __fmaf_rn(max, scale, -origin);
    const float beyond = fmaxf(octaves * 0.6931472f, 0.0f);
    // At lower temperatures the pass's scale overflows: its weights are 0 where the exact ones are not.
    if (!(limits.temperature >= 1e-38f)) return unknown;
    if (!(octaves > -1.0f) || !(octaves < 87.0f) || !(sum >= 0.0f && sum < 1e30f) || !(fabsf(origin) < 1e30f) ||
        !(fabsf(max) < 1e30f)) {
      return unknown;
    }
    constexpr float kUnit = 1.0f / (1 << 24), kLn2 = 0.6931472f;
    // The quotient of the two overflows where the sum is a few of the least weights there are.
    const float tilt = sum > 0.0f ? (__log2f((float)row.size) - __log2f(sum) + 1.0f) * kLn2 : 0.0f;
    const float error = kUnit * (6.0f * tilt + 8.0f * beyond + 136.0f);
    const double rest = sum * exp2_approx(-octaves);
    return {fmax(rest * (1.0f - error) - row.size * 0x1p-62, 0.0), rest * (1.0f + error), true};
  }

  // Makes what the members have pushed, all elements with keys in [from, to], common to all;
  // forgets it where it does not fit.
  __device__ void collect(unsigned* slots, unsigned from, unsigned to) {
    __syncthreads();
    unsigned total = *slots;
    if constexpr (C > 1) {
      Team<C>::sync();
      const unsigned lane = threadIdx.x % 32;
      const unsigned counts = lane < Team<C>::size() ? *Team<C>::at(slots, lane) : 0;
      total = __reduce_add_sync(~0u, counts);
      unsigned place = 0;
      for (int r = 0; r < Team<C>::size() && total <= kCandidates; r++) {
        const Elements* slice = Team<C>::at(&shared.slice, r);
        const unsigned count = __shfl_sync(~0u, counts, r);
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < count; i += kThreads) {
          shared.gathered.keys[place + i] = slice->keys[i];
          shared.gathered.positions[place + i] = slice->positions[i];
        }
        place += count;
      }
      Team<C>::sync();  // The slices are free again.
    }
    if (threadIdx.x == 0) route_counters().gathered = total;
    if (total > kCandidates) {
      forget();
      return;
    }
    gathered = total, low = from, high = to;
  }

  __device__ void forget() { gathered = 0, low = ~0u, high = 0; }

  // Part 3: the key at which the measure, taken in descending order from `to`, reaches the target;
  // `above` is the measure beyond `to`. The measure of all keys in [from, to] reaches it.
  template <class M>
  __device__ Found<M> locate(unsigned from, unsigned to, typename M::Sum above,
                             typename M::Sum target) {
    typedef typename M::Sum Sum;
    if (high >= to && gathered) {
      bool hit = low <= from;
      if (!hit) {
        Sum sum = M::zero();
#pragma unroll 1
        for (int i = threadIdx.x; i < gathered; i += kThreads) {
          const unsigned key = shared.gathered.keys[i];
          if (key >= from && key <= to) sum = sum + measure<M>(key);
        }
        hit = !(above + block_sum<M>(sum) < target);
      }
      if (hit) return search<M>(max(low, from), to, above, target);
    }
    if constexpr (kVariant.searches == Searches::kQuaternary || kVariant.searches == Searches::kBinary) {
      return Alternatives::search_row<M>(*this, from, to, above, target);
    } else if constexpr (kVariant.searches == Searches::kSorted) {
      return Alternatives::search_sorted_row<M>(*this, to, above, target);
    } else {
      return narrow_apart<M>(from, to, above, target);
    }
  }
  template <class M>
  __device__ __forceinline__ Found<M> narrow_apart(unsigned from, unsigned to, typename M::Sum above,
                                                   typename M::Sum target) {
    Found<M> found;
    apart([=, &found](Kept& kept) { found = kept.template narrow<M>(from, to, above, target); });
    return found;
  }

  template <class M>
  static __device__ __forceinline__ typename M::Sum measure(const Softmax& softmax, unsigned key);
  template <class M>
  __device__ __forceinline__ typename M::Sum measure(unsigned key) const { return measure<M>(softmax, key); }

  template <class M>
  __device__ Found<M> search(unsigned from, unsigned to, typename M::Sum above,
                             typename M::Sum target) {
    if constexpr (kVariant.searches == Searches::kSorted) {
      return Alternatives::search_sorted<M>(*this, to, above, target);
    }
    return search_gathered<M>(shared.gathered.keys, gathered, softmax, from, to, above, target);
  }
  template <class M>
  static __device__ __noinline__ Found<M> search_gathered(const unsigned* keys, int n, const Softmax softmax, unsigned from,
                                                          unsigned to, typename M::Sum above, typename M::Sum target) {
    return pivot_search<M>(
        n, from, to, above, target,
        [keys](int i, unsigned* key) {
          *key = keys[i];
          return true;
        },
        [keys, softmax](int i) { return measure<M>(softmax, keys[i]); });
  }

  // A miss: histograms of the row narrow the range until it fits on chip, or is one key.
  template <class M>
  __device__ Found<M> narrow(unsigned from, unsigned to, typename M::Sum above,
                             typename M::Sum target) {
    typedef typename M::Sum Sum;
    struct Choice {
      Sum above;
      unsigned bin, count;
    };
    __shared__ Choice choice;
    __shared__ unsigned slots;
    while (true) {
      const int shift = max(0, 21 - __clz((to - from) | 1));  // 2048 bins at most
      Histogram& histogram = shared.histogram;
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < kBins; i += kThreads) {
        histogram.counts[i] = histogram.mass0[i] = histogram.mass1[i] = histogram.mass2[i] = 0;
      }
      __syncthreads();
      count_step(), count_pass(kFallback);
      tally_slice<M>(row, softmax, &histogram, from, to, shift);
      Team<C>::sync();
      // Each thread looks at a few bins, the first thread at the uppermost.
      constexpr int kEach = kBins / kThreads;
      static_assert(kEach * kThreads == kBins, "all bins are looked at");
      const int upper = kBins - 1 - kEach * threadIdx.x;
      Sum own[kEach], sum = M::zero();
#pragma unroll
      for (int i = 0; i < kEach; i++) own[i] = tallied<M>(upper - i), sum = sum + own[i];
      Sum total;
      Sum before = above + block_exclusive_sum(sum, M::zero(), AddSums(), &total);
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const Sum after = before + own[i];
        if (before < target && !(after < target)) {
          choice = {before, (unsigned)(upper - i), tallied<Count>(upper - i)};
        }
        before = after;
      }
      if (threadIdx.x == 0) slots = 0;
      Team<C>::sync();  // The histograms are free again.
      const unsigned count = choice.count;
      above = choice.above;
      from += choice.bin << shift;
      to = min(to, from + ((1u << shift) - 1));
      if (shift == 0) {
        forget();
        __syncthreads();
        return {from, above};
      }
      if (count <= kCandidates) {
        count_pass();
        gather_slice(row, from, to, &shared.slice, &slots);
        collect(&slots, from, to);
        return search<M>(from, to, above, target);
      }
    }
  }

  template <class M>
  static __device__ __forceinline__ void tally(const Softmax& softmax, Histogram* histogram, unsigned bin, unsigned key);
  // A bin's sum over the team.
  template <class M>
  __device__ __forceinline__ typename M::Sum tallied(int bin) const;

  // Between integers, a bound towards 0; and a mass, by one rounding of each part.
  static __device__ __forceinline__ Mass mass_of(double bound) {
    const u64 high = (u64)(bound * 0x1p-64);
    return {(u64)(bound - (double)high * 0x1p64), high};
  }
  static __device__ __forceinline__ double as_double(Mass m) {
    return __ull2double_rn(m.high) * 0x1p64 + __ull2double_rn(m.low);
  }

  // The mass of everything with a greater key.
  __device__ Mass mass_above(unsigned key) const {
    if (high == ~0u && gathered && key + 1 >= low) return sum_gathered(shared.gathered.keys, gathered, softmax, key);
    count_pass(kSecondPass);
    reads = true;
    return team_combine<C>(block_sum<Weight>(slice_mass_above(row, softmax, key)), AddSums());
  }

  static __device__ __noinline__ Mass sum_gathered(const unsigned* keys, int n, const Softmax softmax, unsigned key) {
    Mass sum = {0, 0};
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += kThreads) {
      if (keys[i] > key) sum = sum + measure<Weight>(softmax, keys[i]);
    }
    return block_sum<Weight>(sum);
  }

  // Cuts to the nucleus. Before, `ties` elements at the cut's key are kept, or it is exclusive. What a pass has
  // summed is relative to `reference`.
  __device__ void top_p(int joint, unsigned* ties, float reference) {
    const bool limited = *ties > 0, of_kept = limited && !joint;
    const bool on_chip = gathered && high == ~0u && (!limited || cut_key + 1 >= low);
    if (kBrackets && !on_chip) {
      cut_by_mass(joint, ties, limits.top_p, CUDART_INF_F);
      return;
    }
    const u64 each = limited ? mass_of_few(softmax, value_of(cut_key)) : 0;
    const Mass above = limited ? mass_above(cut_key) : Mass{0, 0};
    Mass least, most;
    bool exact = true;
    if (kBrackets && sums(joint) && !of_kept && low > kNegInfinityKey + 1) {
      // The f32 sum may do.
      const Mass inside = mass_above(low - 1);
      const Rest rest = bound(passed_sum(), reference);
      if (rest.known) {
        least = nucleus(limits.top_p, inside + mass_of(rest.least * 0x1p62));
        most = nucleus(limits.top_p, inside + mass_of(rest.most * 0x1p62) + Mass{1, 0});
        if (!limited && inside < least) {
          const double outside = 0.5 * (rest.least + rest.most), own = as_double(inside) * 0x1p-62;
          cut_by_mass(joint, ties, (float)((limits.top_p * (outside + own) - own) / outside), value_of(low));
          return;
        }
        exact = false;
      }
    }
    while (true) {
      if (exact) {
        least = nucleus(limits.top_p, of_kept ? above + times(each, *ties) : mass_above(kNegInfinityKey));
        most = least;
      }
      if (cut_for_all(above, each, ties, least, most)) return;
      exact = true;
    }
  }

  // Cuts to what reaches a target in [least, most], if that is the same for all of them. `above` and `each`: the mass
  // above the cut before, and of one of its ties.
  __device__ bool cut_for_all(Mass above, u64 each, unsigned* ties, Mass least, Mass most) {
    if (*ties > 0) {
      if (above + times(each, *ties) < least) return true;
      if (above < least) {
        const unsigned enough = min(*ties, ties_for(least - above, each));
        if (enough < *ties && above + times(each, enough) < most) return false;
        *ties = enough;
        return true;
      }
    }
    const Found<Weight> found = locate<Weight>(cut_key + 1, best_key, Mass{0, 0}, least);
    const u64 its = mass_of_few(softmax, value_of(found.key));
    const unsigned enough = ties_for(least - found.above, its);
    if (found.above + times(its, enough) < most) return false;
    cut_key = found.key, *ties = enough;
    return true;
  }

  // The same for a set that is not on chip. The cut is looked for where a sample of the row says, which is to say where
  // so large a `share` is reached of the weights below the ceiling, and above the cut, if it is one of what is kept.
  __device__ void cut_by_mass(int joint, unsigned* ties, float share, float ceiling) {
    const bool limited = *ties > 0, of_kept = limited && !joint;
    const unsigned kept_key = cut_key, kept_ties = *ties;
    const u64 each = limited ? mass_of_few(softmax, value_of(cut_key)) : 0;
    const float floor = of_kept ? value_of(cut_key) : -CUDART_INF_F;
    if (C > 1 && limited) Team<C>::sync();  // Others may still read what has been counted.
    forget();
    const Bracket bracket = C > 1 && row.staged ? bracket_on_chip(share, floor, ceiling)
                                                : bracket_of(row, &shared.histogram, share, scale, floor, ceiling);
    const Sums<Weight> sums = measure_bracket<Weight>(bracket, floor);
    const Mass whole = of_kept ? sums.whole + times(each, *ties) : sums.whole;
    const Mass target = nucleus(limits.top_p, whole);
    if (of_kept && sums.whole < target) {
      *ties = min(*ties, ties_for(target - sums.whole, each));
      return;
    }
    Found<Weight> found;
    Last last = {0, 0, 0};
    const unsigned from = of_kept ? kept_key + 1 : kNegInfinityKey + 1;
    Known known;
    if constexpr (C == 1) known = cut_by_bounds(bracket, from, sums, target, &found);
    else known = cut_in_bracket<Weight>(bracket, from, sums, target, &found, &last);
    if (known == Known::kKey) {
      cut_key = found.key, *ties = ties_for(target - found.above, mass_of_few(softmax, value_of(found.key)));
    } else if (known == Known::kElement) {
      cut_key = last.key, *ties = last.ties;
      if (!limited || !joint) cut_end = last.end, *ties = 0;
    }
    if (limited && joint) {
      if (open) *ties = resolve();
      if (cut_key < kept_key) cut_key = kept_key, *ties = kept_ties;
      else if (cut_key == kept_key) *ties = min(*ties, kept_ties);
    }
  }

  // The same for a top-k of more than can be gathered.
  __device__ bool cut_by_count(unsigned* ties) {
    const unsigned k = limits.top_k;
    forget();
    const Bracket bracket = bracket_of(row, &shared.histogram, (float)k / (float)row.size, -1.0f, -CUDART_INF_F, CUDART_INF_F);
    const Sums<Count> sums = measure_bracket<Count>(bracket, -CUDART_INF_F);
    numbers = sums.whole;
    if (has_nan) count_all();
    cut_key = ~0u, cut_end = 0;
    if (numbers == 0) return true;
    softmax = Softmax(value_of(best_key), limits.temperature);
    cut_key = kNegInfinityKey;
    if (k >= numbers) return false;
    Found<Count> found;
    Last last = {0, 0, 0};
    const Known known = cut_in_bracket<Count>(bracket, kNegInfinityKey + 1, sums, k, &found, &last);
    if (known == Known::kKey) {
      cut_key = found.key, *ties = k - found.above;
    } else if (known == Known::kElement) {
      cut_key = last.key, *ties = last.ties;
      // What else there may be to do needs no more than the key.
      if (!(limits.top_p < 1.0f)) cut_end = last.end, *ties = 0;
    }
    return false;
  }

  // The least and the greatest of some keys.
  struct Ends {
    unsigned least, most;
  };
  struct Widest {
    __device__ __forceinline__ Ends operator()(Ends a, Ends b) const { return {min(a.least, b.least), max(a.most, b.most)}; }
  };

  // Where a sample of the row says that `share` of it is reached in descending order, with what the sample may be off
  // by to both sides. Of its weights, or where the scale is negative of its number.
  static __device__ __noinline__ Bracket bracket_of(const TeamRow row, Histogram* histogram, float share, float scale,
                                                    float floor, float ceiling) {
    constexpr int kEach = kBins / kThreads;
    __shared__ struct {
      unsigned squares;
      int lowest, highest;
    } said;
    const Sampled x(row);
    const auto takes_part = [&](float v) { return v > floor && v < ceiling; };
    const Widest widest;
    Ends ends = {~0u, 0};
#pragma unroll
    for (int i = 0; i < Sampled::kVectors; i++) {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        const unsigned key = key_of(x(i, w));
        if (takes_part(x(i, w))) ends = widest(ends, Ends{key, key});
      }
    }
    ends = block_reduce(ends, widest);
    if (ends.most < ends.least) return {0.0f, 0.0f, 0.0f};
    // By keys, as even as they are.
    const float most = value_of(ends.most);
    const unsigned least = ends.least, range = ends.most - least;
    const unsigned factor = (unsigned)((float)(kBins - 2) / fmaxf((float)range, (float)kBins) * 0x1p32f);
    const auto bin_of = [=](float v) { return (int)__umulhi(key_of(v) - least, factor); };
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      histogram->counts[threadIdx.x + i * kThreads] = histogram->mass0[threadIdx.x + i * kThreads] = 0;
    }
    if (threadIdx.x == 0) said = {0, 0, kBins - 1};
    __syncthreads();
    // Integers, that their order be of no account: members of a team must find the same.
    constexpr float kUnit = (float)(0x1p31 / Sampled::kSize);
#pragma unroll
    for (int i = 0; i < Sampled::kVectors; i++) {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        if (!takes_part(x(i, w))) continue;
        const float weight = scale < 0.0f ? 1.0f : exp2_approx((x(i, w) - most) * scale);
        const int bin = bin_of(x(i, w));
        shared_add(&histogram->counts[bin], __float2uint_rz(weight * kUnit));
        shared_add(&histogram->mass0[bin], __float2uint_rz(weight * weight * kUnit));
      }
    }
    __syncthreads();
    struct Both {
      unsigned weights, squares;
      __device__ Both operator+(const Both& other) const {
        return {weights + other.weights, squares + other.squares};
      }
    };
    const int upper = kBins - 1 - kEach * threadIdx.x;
    Both own[kEach], sum = {0, 0}, total;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      own[i] = {histogram->counts[upper - i], histogram->mass0[upper - i]}, sum = sum + own[i];
    }
    const Both start = block_exclusive_sum(sum, Both{0, 0}, AddSums(), &total);
    // What is left out of a count is below all else.
    const float all = scale < 0.0f ? 0x1p31f : (float)total.weights, target = share * all;
    const float squares = scale < 0.0f ? 0x1p31f : (float)total.squares;
    // f(bin, the sums before it) where the sum of weights first exceeds a limit.
    const auto find = [&](float limit, auto f) {
      Both before = start;
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const Both after = before + own[i];
        if ((float)before.weights <= limit && limit < (float)after.weights) f(upper - i, before);
        before = after;
      }
    };
    find(target, [&](int, const Both& before) { said.squares = before.squares; });
    __syncthreads();
    // The deviation of the sum above a cut from its share.
    const float above = (float)said.squares, other = 1.0f - share;
    const float variance = above * other * other + (squares - above) * share * share;
    const float margin = 4.0f * sqrtf(variance * kUnit) + 2.0f * (scale < 0.0f ? kUnit : 0.0f);
    find(target - margin, [&](int bin, const Both&) { said.highest = bin; });
    find(target + margin, [&](int bin, const Both&) { said.lowest = bin; });
    __syncthreads();
    ends = {~0u, 0};
#pragma unroll
    for (int i = 0; i < Sampled::kVectors; i++) {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        if (!takes_part(x(i, w))) continue;
        const unsigned key = key_of(x(i, w));
        const int bin = bin_of(x(i, w));
        ends = widest(ends, Ends{bin >= said.lowest ? key : ~0u, bin <= said.highest ? key : 0});
      }
    }
    ends = block_reduce(ends, widest);
    const float low = value_of(ends.least), high = value_of(max(ends.least, ends.most));
    return {low, high, high > low ? kBinsOf<C> / (high - low) : 0.0f};
  }

  // What is above a bracket, and in all above a floor.
  template <class M>
  struct Sums {
    typename M::Sum above, whole;
    // Of one block, which sums what is above in the end, instead of a mass: in units of the greatest weight, off by 2^-20.
    double about;
  };
  // A block's.
  template <class M>
  static __device__ __noinline__ Sums<M> block_sums(Sums<M> own, Mass (*words)[kWarps]) {
    auto* const parts = reinterpret_cast<typename M::Sum(*)[kWarps]>(words);
    const int lane = threadIdx.x % 32;
    own.above = M::warp(own.above), own.whole = M::warp(own.whole);
    __syncthreads();
    if (lane == 0) parts[0][threadIdx.x / 32] = own.above, parts[1][threadIdx.x / 32] = own.whole;
    __syncthreads();
    own.above = M::warp(lane < kWarps ? parts[0][lane] : M::zero());
    own.whole = M::warp(lane < kWarps ? parts[1][lane] : M::zero());
    return own;
  }
  // A thread's. Where all of the bracket is one value, it is counted here.
  struct Counted {
    unsigned above, whole, inside;
    float best;

    __device__ __forceinline__ void add(float x, const Bracket& bracket, bool one, unsigned* counts) {
      whole += x > -CUDART_INF_F;
      if (x > bracket.high) above++;
      else if (x >= bracket.low) {
        if (one) inside++;
        else shared_count(&counts[bracket.bin<C>(x)]);
      }
    }
  };
  struct Weighed {
    Mass above, whole;
    unsigned inside;
    double about;
  };
  static __device__ __noinline__ Counted count_slice(const TeamRow row, const Bracket bracket, unsigned* counts) {
    Counted own = {0, 0, 0, -CUDART_INF_F};
    const bool one = bracket.low == bracket.high;
    row.template for_each_tile<kLight>([&](const Vector<T>(&v)[kLight], int) {
#pragma unroll
      for (int d = 0; d < kLight; d++) {
        own.best = max_or_nan(own.best, max_or_nan(v[d]));
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) own.add(widen(v[d].at[w]), bracket, one, counts);
      }
    });
    int at;
    if (row.has_edge(&at)) {
      const Vector<T> v = row.load(at);
      own.best = max_or_nan(own.best, max_or_nan(v));
#pragma unroll 1
      for (int w = 0; w < Row<T>::kWidth; w++) own.add(widen(v.at[w]), bracket, one, counts);
    }
    return own;
  }

  // The weights of a slice above a floor, and of those the ones above the bracket; what is inside goes into the histogram.
  // No call: what lives through one has few registers.
  template <Exponents kExponents>
  static __device__ __noinline__ Weighed weigh_slice(const TeamRow row, const Softmax softmax, const Bracket bracket,
                                                     float floor) {
    // By what is known without a register.
    BracketHistogram<C>* const histogram = &reinterpret_cast<Shared<C>*>(dynamic)->bracketed;
    constexpr int kDepth = C == 1 ? 2 : 1;
    const Weights<kExponents> weights(softmax);
    typename Weights<kExponents>::Sum whole, above;
    unsigned count = 0;
    double about = 0.0;
    const bool one = bracket.low == bracket.high;
    row.template for_each_tile<kDepth>([&](const Vector<T>(&v)[kDepth], int) {
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        float some = 0.0f;
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) {
          const float x = widen(v[d].at[w]);
          const bool is_above = x > bracket.high;
          const float weight = weights.of(x, x > floor);
          if constexpr (C == 1) whole.add(weight), some += is_above ? weight : 0.0f;
          else whole.add(weight, above, is_above);
          if (x >= bracket.low && !is_above) {
            if (one) count++;
            else if constexpr (C == 1) shared_count(&histogram->counts[bracket.bin<C>(x)]);
            else add_mass(histogram, bracket.bin<C>(x), Softmax::mass_of(weight));
          }
        }
        if constexpr (C == 1) about += (double)some;
      }
    });
    return {above.mass(), whole.mass(), count, about};
  }
  static __device__ __noinline__ Weighed weigh_edge(const TeamRow row, int at, const Softmax softmax, const Bracket bracket,
                                                    float floor, BracketHistogram<C>* histogram) {
    const Vector<T> v = row.load(at);
    Weighed own = {{0, 0}, {0, 0}, 0, 0.0};
#pragma unroll
    for (int w = 0; w < Row<T>::kWidth; w++) {
      const float x = widen(v.at[w]);
      const u64 mass = x > floor ? mass_of_few(softmax, x) : 0;
      own.whole = own.whole + Mass{mass, 0};
      if (x > bracket.high) {
        own.above = own.above + Mass{mass, 0}, own.about += (double)mass * 0x1p-62;
      } else if (x >= bracket.low) {
        if (bracket.low == bracket.high) own.inside++;
        else if constexpr (C == 1) shared_count(&histogram->counts[bracket.bin<C>(x)]);
        else add_mass(histogram, bracket.bin<C>(x), mass);
      }
    }
    return own;
  }

  // The pass: sums, and a histogram of what the bracket holds, which is sought in there. What is counted gives the
  // maximum as well.
  template <class M>
  __device__ Sums<M> measure_bracket(const Bracket& bracket, float floor) {
    constexpr bool kWeighs = sizeof(typename M::Sum) != sizeof(unsigned);
    BracketHistogram<C>& histogram = shared.bracketed;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kBinsOf<C>; i += kThreads) {
      histogram.counts[i] = 0;
      if constexpr (kWeighs && C > 1) histogram.mass0[i] = histogram.mass1[i] = histogram.mass2[i] = 0;
    }
    if (threadIdx.x == 0) {
      shared.few.slots = 0, settled() = false;
      if constexpr (C > 1) bin_mail<M>().open(), few_mail<M>().open();
    }
    __syncthreads();
    count_step(), count_pass(kWeighs ? kFallback | kSecondPass : kFallback);
    struct Said {
      Sums<M> sums;
      unsigned best;
    } said = {};
    unsigned count;
    if constexpr (kWeighs) {
      Weighed own;
      by_exponents(softmax, ((row.end - row.begin) / kThreads + 2) * Row<T>::kWidth, [&](auto way) {
        own = weigh_slice<way.kWay>(row, softmax, bracket, floor);
      });
      int at;
      if (row.has_edge(&at)) {
        const Weighed edge = weigh_edge(row, at, softmax, bracket, floor, &histogram);
        own.above = own.above + edge.above, own.whole = own.whole + edge.whole;
        own.inside += edge.inside, own.about += edge.about;
      }
      said.sums = block_sums<M>({own.above, own.whole, 0.0}, shared.few.parts), count = own.inside;
      if constexpr (C == 1) said.sums.about = block_reduce(own.about, AddSums());
    } else {
      const Counted own = count_slice(row, bracket, histogram.counts);
      said.sums = block_sums<M>({own.above, own.whole, 0.0}, shared.few.parts), count = own.inside;
      said.best = block_reduce(own.best != own.best ? ~0u : key_of(own.best), [](unsigned a, unsigned b) { return max(a, b); });
    }
    if (bracket.low == bracket.high) {
      count = block_sum<Count>(count);
      if (threadIdx.x == 0) {
        histogram.counts[0] = count;
        if constexpr (kWeighs && C > 1) {
          const Mass mass = times(mass_of_few(softmax, bracket.low), count);
          histogram.mass0[0] = (unsigned)mass.low, histogram.mass1[0] = mass.low >> 32, histogram.mass2[0] = mass.high;
        }
      }
    }
    if constexpr (C == 1) {
      __syncthreads();
    } else {
      reads = true;
      __shared__ Said heard;
      if (threadIdx.x == 0) heard = said;
      Team<C>::sync();
      const unsigned lane = threadIdx.x % 32;
      said = {};
      if (lane < Team<C>::size()) said = *Team<C>::at(&heard, lane);
      said.sums.above = M::warp(said.sums.above), said.sums.whole = M::warp(said.sums.whole);
      said.best = __reduce_max_sync(~0u, said.best);
    }
    if constexpr (!kWeighs) {
      has_nan = said.best == ~0u, best_key = said.best, best_position = ~0u;
      has_infinity = best_key == key_of(CUDART_INF_F);
    }
    return said.sums;
  }

  // What the team's bins hold: the number in the upper half of the sum's, where that is a mass. Each member adds up a
  // share of them, and sends it to all.
  template <class M>
  __device__ __forceinline__ void sum_bins() {
    if constexpr (C > 1) {
      constexpr bool kWeighs = sizeof(typename M::Sum) != sizeof(unsigned);
      const int size = Team<C>::size(), each = share(kBinsOf<C>, size);
      const int bin = Team<C>::rank() * each + threadIdx.x;
      if (threadIdx.x == 0) bin_mail<M>().expect(sizeof(shared.bracketed.sums));
      if (threadIdx.x < each && bin < kBinsOf<C>) {
        Mass sum = {0, 0};
#pragma unroll
        for (int r = 0; r < C; r++) {
          if (r >= size) continue;
          const BracketHistogram<C>& h = *Team<C>::at(&shared.bracketed, r);
          if (kWeighs) sum = sum + Mass{(u64)h.mass1[bin] << 32 | h.mass0[bin], (u64)h.counts[bin] << 32 | h.mass2[bin]};
          else sum.low += h.counts[bin];
        }
        const uint4 words = {(unsigned)sum.low, (unsigned)(sum.low >> 32), (unsigned)sum.high, (unsigned)(sum.high >> 32)};
        uint4* const to = reinterpret_cast<uint4*>(&shared.bracketed.sums[bin]);
#pragma unroll 1
        for (int r = 0; r < size; r++) bin_mail<M>().send(to, words, r);
      }
      bin_mail<M>().wait(0);
    }
  }
  // A bin's number or mass over the team, and its number.
  template <class M>
  __device__ __forceinline__ typename M::Sum bracketed(int bin, unsigned* count) const {
    constexpr bool kWeighs = sizeof(typename M::Sum) != sizeof(unsigned);
    if constexpr (C > 1) {
      const Mass its = shared.bracketed.sums[bin];
      *count = kWeighs ? its.high >> 32 : its.low;
      if constexpr (kWeighs) return Mass{its.low, (unsigned)its.high};
      else return *count;
    } else {
      static_assert(!kWeighs, "one block bounds masses");
      return *count = shared.bracketed.counts[bin];
    }
  }

  // How a cut in a bracket is known: by its key; by the range that it is left open in; or in full.
  enum class Known { kKey, kRange, kElement };
  // Where it is in full: how many elements with the key are kept, up to which position.
  struct Last {
    unsigned key, ties, end;
  };

  // Leaves the cut open: in a range of so few elements that they can be noted.
  __device__ __forceinline__ void leave_open(unsigned from, unsigned to, bool by_mass, bool sums, Mass rest, unsigned count) {
    open = true, cut_key = ~0u, cut_end = 0;
    if (threadIdx.x == 0) {
      left_open() = {from, to, value_of(from), greatest_up_to(to), by_mass, sums, rest, 0};
      route_counters().gathered = count;
    }
    __syncthreads();
  }

  // Where the measure reaches the target: among keys from `least` on, the measure above the bracket being `sums.above`.
  // The cut is left open if no more elements than fit are left to look at.
  template <class M>
  __device__ Known cut_in_bracket(const Bracket& bracket, unsigned least, const Sums<M>& sums, typename M::Sum target,
                                  Found<M>* found, Last* last) {
    typedef typename M::Sum Sum;
    constexpr bool kWeighs = sizeof(Sum) != sizeof(unsigned);
    __shared__ struct {
      Sum above;
      unsigned bin, count, ends[2];
    } choice;
    unsigned from, to, count = ~0u;
    Sum before;
    if (!(sums.above < target)) {
      from = key_of(bracket.high) + 1, to = best_key, before = M::zero();
      if constexpr (!kWeighs) count = sums.above;
    } else {
      sum_bins<M>();
      // Each thread looks at a few bins, the first thread at the uppermost.
      constexpr int kEach = kBinsOf<C> / kThreads;
      static_assert(kEach * kThreads == kBinsOf<C>, "all bins are looked at");
      const int upper = kBinsOf<C> - 1 - kEach * (int)threadIdx.x;
      Sum own[kEach], sum = M::zero(), total;
      unsigned counts[kEach];
#pragma unroll
      for (int i = 0; i < kEach; i++) own[i] = bracketed<M>(upper - i, &counts[i]), sum = sum + own[i];
      Sum start = sums.above + block_exclusive_sum(sum, M::zero(), AddSums(), &total);
      before = sums.above + total;
      if (before < target) {
        from = least, to = key_of(bracket.low) - 1;
        if constexpr (!kWeighs) count = numbers - before;
      } else {
#pragma unroll
        for (int i = 0; i < kEach; i++) {
          const Sum after = start + own[i];
          if (start < target && !(after < target)) {
            choice.above = start, choice.bin = upper - i, choice.count = counts[i];
          }
          start = after;
        }
        __syncthreads();
        before = choice.above, count = choice.count;
        if (C > 1 && count <= Few<C>::kMost) {
          *last = settle_bin<M>(bracket, choice.bin, target - before);
          return Known::kElement;
        }
        if constexpr (C > 1) {
          // Many may be one value.
          const Ends ends = team_reduce<C>(ends_in_bin(row, bracket, choice.bin), Widest());
          from = ends.least, to = ends.most;
        } else {
          find_ends(bracket, choice.bin, choice.bin, choice.ends);
          from = choice.ends[0], to = choice.ends[1];
        }
      }
    }
    if (C > 1 && from == to) {
      *found = {from, before};
      return Known::kKey;
    }
    if (count <= kCandidates) {
      Mass rest;
      if constexpr (kWeighs) rest = target - before;
      else rest = Mass{target - before, 0};
      leave_open(from, to, kWeighs, false, rest, count);
      return Known::kRange;
    }
    if (from == to) {
      *found = {from, before};
    } else {
      if constexpr (C > 1) Team<C>::sync();  // Others may still read the bins.
      *found = narrow_apart<M>(from, to, before, target);
    }
    return Known::kKey;
  }

  // The same of one block, by mass. What a bin holds lies between its number times the weights of its two ends: so the
  // cut lies in few bins, and it is left open in those. The pass that settles it sums what is above them, in time that it
  // would wait for memory; adding up the masses of bins takes more than all else here.
  //
  // An exact weight is off by 2^-21 of itself, with the rounding of its exponent by 2^-17, and by the rounding of
  // bins as an exponent by 2^-22 of the bracket's width over the temperature; the sum above the bracket is off by 2^-20.
  // All is taken for twice that, or more.
  __device__ Known cut_by_bounds(const Bracket& bracket, unsigned least, const Sums<Weight>& sums, Mass target,
                                 Found<Weight>* found) {
    struct Bounds {
      double least, most;
      __device__ Bounds operator+(const Bounds& other) const { return {least + other.least, most + other.most}; }
    };
    __shared__ struct {
      unsigned after_first, after_last, count, ends[2];
    } choice;
    if (threadIdx.x == 0) choice = {0, 0, 0, {0, 0}};
    constexpr int kEach = kBinsOf<C> > kThreads ? kBinsOf<C> / kThreads : 1;
    static_assert(kEach * kThreads == kBinsOf<C>, "all bins are looked at");
    const int upper = kBinsOf<C> - 1 - kEach * (int)threadIdx.x;
    const double t = softmax.scaled_temperature, width = ((double)bracket.high - bracket.low) / t;
    const double base = ((double)bracket.low - softmax.max) / t;
    // A bracket so narrow that bins have no width has all in one, whatever that stands for; but not where it is one value.
    const bool bins = bracket.bins < CUDART_INF_F || bracket.low == bracket.high;
    const bool bounded = softmax.scale == 1.0f && bins && width < 16.0 && base > -60.0;
    Bounds own[kEach], sum = {0.0, 0.0}, total;
    unsigned counts[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int bin = upper - i;
      counts[i] = shared.bracketed.counts[bin];
      const double low = exp(base + width * (bin * (1.0 / kBinsOf<C>))) - 0x1p-60;
      const double high = exp(base + width * ((bin + 1) * (1.0 / kBinsOf<C>)));
      own[i] = {counts[i] * fmax(low, 0.0) * (1.0 - 0x1p-15), counts[i] * high * (1.0 + 0x1p-15)};
      sum = sum + own[i];
    }
    Bounds above = block_exclusive_sum(sum, Bounds{0.0, 0.0}, AddSums(), &total);
    const double exact = as_double(target) * 0x1p-62, before = sums.about;
    const double begin_least = before * (1.0 - 0x1p-19) - row.size * 0x1p-61, begin_most = before * (1.0 + 0x1p-19);
    const double reaches = exact * (1.0 + 0x1p-40), may_reach = exact * (1.0 - 0x1p-40);
    above.least += begin_least, above.most += begin_most;
    // The uppermost bins of which it may be reached, and is.
    unsigned after_first = 0, after_last = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      above = above + own[i];
      if (after_first == 0 && above.most >= may_reach) after_first = upper - i + 1;
      if (after_last == 0 && above.least >= reaches) after_last = upper - i + 1;
    }
    after_first = __reduce_max_sync(~0u, after_first), after_last = __reduce_max_sync(~0u, after_last);
    if (threadIdx.x % 32 == 0) atomicMax(&choice.after_first, after_first), atomicMax(&choice.after_last, after_last);
    __syncthreads();
    const int first = (int)choice.after_first - 1, last = (int)choice.after_last - 1;
    unsigned from = least, to = best_key, count = ~0u;
    if (bounded && begin_most < may_reach && last >= 0) {
      unsigned those = 0;
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        if (upper - i >= last && upper - i <= first) those += counts[i];
      }
      those = __reduce_add_sync(~0u, those);
      if (threadIdx.x % 32 == 0 && those) atomicAdd(&choice.count, those);
      find_ends(bracket, last, first, choice.ends);
      from = choice.ends[0], to = choice.ends[1], count = choice.count;
    }
    if (count <= kCandidates) {
      leave_open(from, to, true, true, target, count);
      return Known::kRange;
    }
    Mass exactly = {0, 0};
    if (to != best_key) count_pass(), exactly = block_sum<Weight>(much_mass_above(row, softmax, to));
    if (from == to) *found = {from, exactly};
    else *found = narrow_apart<Weight>(from, to, exactly, target);
    return Known::kKey;
  }

  // The least and the greatest key that may be in some bins.
  __device__ __forceinline__ void find_ends(const Bracket& bracket, int from_bin, int to_bin, unsigned* ends) const {
    if (threadIdx.x < 64) {
      const unsigned end = first_from_bin(bracket, threadIdx.x < 32 ? from_bin : to_bin + 1);
      if (threadIdx.x % 32 == 0) ends[threadIdx.x / 32] = key_of(ordered(threadIdx.x < 32 ? end : end - 1));
    }
    __syncthreads();
  }

  // The cut among few elements, one a lane: `rest` is reached by them, in their order.
  template <class M>
  __device__ __forceinline__ Last rank_few(u64 order, unsigned count, typename M::Sum rest) const {
    typedef typename M::Sum Sum;
    const unsigned lane = threadIdx.x % 32;
    Sum own = M::zero(), before = M::zero();
    if (lane < count) own = measure<M>(order >> 32);
    unsigned ahead = 0;
#pragma unroll 1
    for (unsigned other = 0; other < count; other++) {
      const u64 its_order = shuffle(order, other);
      const Sum its = shuffle(own, other);
      if (its_order > order) before = before + its, ahead++;
    }
    const bool kept = lane < count && before < rest;
    const unsigned all = __popc(__ballot_sync(~0u, kept));
    const int end = max(__ffs(__ballot_sync(~0u, lane < count && ahead + 1 == all)) - 1, 0);
    const u64 its = shuffle(order, end);
    const unsigned ties = __popc(__ballot_sync(~0u, kept && order >> 32 == its >> 32));
    return {(unsigned)(its >> 32), ties, ~(unsigned)its + 1};
  }

  // The cut in a bin of few elements. Each member looks them up in its slice, and sends them to all.
  template <class M>
  __device__ Last settle_bin(const Bracket& bracket, unsigned bin, typename M::Sum rest) {
    Few<C>& few = shared.few;
    __shared__ Last last;
    find_in_bin(row, bracket, bin, &few);
    __syncthreads();
    const unsigned lane = threadIdx.x % 32, size = Team<C>::size(), rank = Team<C>::rank(), warp = threadIdx.x / 32;
    if (threadIdx.x == 0) few_mail<M>().expect(size * (sizeof(few.heard[0]) + sizeof(few.counts[0])));
    if (warp < size) {
      few_mail<M>().send(&few.heard[rank][lane], few.own[lane], warp);
      if (lane == 0) few_mail<M>().send(&few.counts[rank], few.slots, warp);
    }
    few_mail<M>().wait(0);
    if (threadIdx.x == 0) settled() = true;
    if (threadIdx.x < 32) {
      u64 order = 0;
      unsigned count = 0;
#pragma unroll 1
      for (unsigned r = 0; r < size; r++) {
        const unsigned its = few.counts[r];
        if (lane - count < its) order = few.heard[r][lane - count];
        count += its;
      }
      const Last its = rank_few<M>(order, count, rest);
      if (lane == 0) last = its, route_counters().gathered = count;
    }
    __syncthreads();
    return last;
  }
  static __device__ __noinline__ Ends ends_in_bin(const TeamRow row, const Bracket bracket, unsigned bin) {
    count_pass();
    Ends ends = {~0u, 0};
    row.for_each([&](float x, int) {
      if (x >= bracket.low && x <= bracket.high && bracket.bin<C>(x) == bin) ends = Widest()(ends, Ends{key_of(x), key_of(x)});
    });
    return ends;
  }
  static __device__ __noinline__ void find_in_bin(const TeamRow row, const Bracket bracket, unsigned bin, Few<C>* few) {
    count_pass();
    row.for_each([&](float x, int position) {
      if (x >= bracket.low && x <= bracket.high && bracket.bin<C>(x) == bin) {
        few->own[shared_add(&few->slots, 1)] = (u64)key_of(x) << 32 | ~(unsigned)position;
      }
    });
  }

  // A bracket where the row is on chip: by a histogram of all of it, of numbers. A bin is so narrow that its weights are
  // as good as one. What lies below all bins is not in the set: it weighs less than is left out of it.
  __device__ Bracket bracket_on_chip(float share, float floor, float ceiling) {
    unsigned* const counts = shared.histogram.counts;
    unsigned* const all = shared.histogram.mass0;
    __shared__ unsigned chosen;
    const float most = fminf(value_of(best_key), ceiling);
    const float left = fmaxf(1.0f - share, 1e-7f);
    const float range = limits.temperature * (__log2f((float)row.size / left) * 0.6931472f + 1.0f);
    const float least = fmaxf(fmaxf(most - range, floor), -CUDART_MAX_NORMAL_F);
    const float bins = (float)kBins / fmaxf(most - least, 1e-37f);
    if (threadIdx.x == 0) chosen = 0, range_mail().open();
#pragma unroll
    for (int i = 0; i < kBins / kThreads; i++) counts[threadIdx.x + i * kThreads] = 0;
    __syncthreads();
    count_pass();
    count_all_bins(row, least, most, floor, ceiling, bins, counts);
    Team<C>::sync();
    reads = true;
    // Each member adds up a share of fours, and sends it to all.
    const int size = Team<C>::size(), each = ::share(kBins / 4, size), four = Team<C>::rank() * each + threadIdx.x;
    if (threadIdx.x == 0) range_mail().expect(sizeof(shared.histogram.mass0));
    if (threadIdx.x < each && four < kBins / 4) {
      uint4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int r = 0; r < C; r++) {
        if (r >= size) continue;
        const uint4 its = reinterpret_cast<const uint4*>(Team<C>::at(counts, r))[four];
        sum.x += its.x, sum.y += its.y, sum.z += its.z, sum.w += its.w;
      }
#pragma unroll 1
      for (int r = 0; r < size; r++) range_mail().send(reinterpret_cast<uint4*>(all) + four, sum, r);
    }
    range_mail().wait(0);
    constexpr int kEach = kBins / kThreads;
    const int upper = kBins - 1 - kEach * (int)threadIdx.x;
    const float bin_width = 1.0f / bins;
    float own[kEach], sum = 0.0f, total;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const float middle = least + (upper - i + 0.5f) * bin_width;
      own[i] = (float)all[upper - i] * exp2_approx((middle - value_of(best_key)) * scale), sum += own[i];
    }
    float above = block_exclusive_sum(sum, 0.0f, AddSums(), &total);
    const float target = share * total;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const float after = above + own[i];
      if (above < target && target <= after) atomicMax(&chosen, (unsigned)(upper - i));
      above = after;
    }
    __syncthreads();
    const float low = fmaxf(least + ((int)chosen - 2) * bin_width, least), high = fminf(least + ((int)chosen + 3) * bin_width, most);
    if (!(low < high) || !(high < CUDART_INF_F)) return {most, most, 0.0f};
    return {low, high, kBinsOf<C> / (high - low)};
  }
  static __device__ __noinline__ void count_all_bins(const TeamRow row, float least, float most, float floor, float ceiling,
                                                     float bins, unsigned* counts) {
    row.template for_each_tile<2>([&](const Vector<T>(&v)[2], int) {
#pragma unroll
      for (int d = 0; d < 2; d++) {
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) {
          const float x = widen(v[d].at[w]);
          if (x >= least && x <= most && x > floor && x < ceiling) {
            shared_count(&counts[min(__float2uint_rz((x - least) * bins), kBins - 1u)]);
          }
        }
      }
    });
  }

  // The values of the dtype in their order, NaN at both ends.
  static constexpr unsigned kLastValue = sizeof(T) == 2 ? 0xffffu : ~0u;
  static __device__ __forceinline__ float ordered(unsigned place) {
    if constexpr (sizeof(T) == 2) return widen(from_bits<T>(place >> 15 ? place & 0x7fffu : ~place & 0xffffu));
    else return value_of(place);
  }
  // The place of the first value that is above the bracket, or in a bin from this on. By a warp.
  static __device__ __noinline__ unsigned first_from_bin(const Bracket bracket, int bin) {
    const unsigned lane = threadIdx.x % 32;
    unsigned from = 0, to = kLastValue;
    while (from < to) {
      // The last that is known to be in is `to`. All looked at before the first that is in are out.
      const unsigned step = (to - from) / 33 + 1, at = from + (lane + 1) * step - 1;
      bool in = true;
      if (at < to && at >= from) {
        const float x = ordered(at);
        in = x != x ? at > kLastValue / 2 : x > bracket.high || (x >= bracket.low && (int)bracket.bin<C>(x) >= bin);
      }
      const unsigned those = __ballot_sync(~0u, in);
      const unsigned first = those ? __ffs(those) - 1 : 32;
      if (first < 32) to = min(to, from + (first + 1) * step - 1);
      from += first * step;
    }
    return to;
  }

 public:
  // A copy in shared memory, where it is the same for all threads but for what is a thread's own. Once there are no
  // members.
  __device__ __forceinline__ Kept* published() const {
    static_assert(sizeof(Kept) <= sizeof(Apart), "it fits");
    Kept* const copy = reinterpret_cast<Kept*>(shared.apart.bytes);
    __syncthreads();
    if (threadIdx.x == 0) new (copy) Kept(*this);
    __syncthreads();
    return copy;
  }

  // Notes an element of the slice, if there is room. Of many: an addition for all that come together.
  static __device__ __forceinline__ void push(unsigned key, int position, Elements* slice, unsigned* slots) {
    const auto group = cooperative_groups::coalesced_threads();
    unsigned slot = 0;
    if (group.thread_rank() == 0) slot = shared_add(slots, group.size());
    slot = group.shfl(slot, 0) + group.thread_rank();
    if (slot < kCandidates) slice->keys[slot] = key, slice->positions[slot] = position;
  }

  // Notes what a vector holds of the open range. By itself, that no vector need be in memory.
  static __device__ __noinline__ void note_open(const Vector<T> v, int first, float low, float high, Elements* slice,
                                                unsigned* slots) {
#pragma unroll
    for (int w = 0; w < Row<T>::kWidth; w++) {
      const float x = widen(v.at[w]);
      if (x >= low && x <= high) push(key_of(x), first + w, slice, slots);
    }
  }
  // Once every member has noted all of its slice: the cut. Where the pass was to sum what is above, with a thread's sum.
  __device__ __forceinline__ void settle(Mass own = {0, 0}) {
    sum_above(own);
    if (C == 1 && left_open().slots <= Few<C>::kMost) {
      settle_few();
      return;
    }
    apart([](Kept& kept) {
      const unsigned ties = kept.close();
      kept.cut_end = kept.position_of_tie(ties);
    });
  }
  // The same by a pass.
  __device__ __forceinline__ void settle_by_pass() { settle(note_slice()); }
  // Whether the pass that settles it is to sum what is above.
  __device__ __forceinline__ bool sums_above() const { return C == 1 && open && left_open().sums; }

 private:
  __device__ __forceinline__ void sum_above(Mass own) {
    if constexpr (C == 1) {
      __syncthreads();
      if (!left_open().sums) return;
      const Mass above = block_sum<Weight>(own);
      if (threadIdx.x == 0) left_open().rest = left_open().rest - above, left_open().sums = false;
      __syncthreads();
    }
  }
  // Of one block, where a warp compares all that are noted.
  __device__ __forceinline__ void settle_few() {
    __shared__ Last last;
    const Open& range = left_open();
    const unsigned count = range.slots;
    if (threadIdx.x < 32) {
      const unsigned lane = threadIdx.x;
      const u64 order = lane < count ? (u64)shared.slice.keys[lane] << 32 | ~shared.slice.positions[lane] : 0;
      Last its;
      if (range.by_mass) its = rank_few<Weight>(order, count, range.rest);
      else its = rank_few<Count>(order, count, (unsigned)range.rest.low);
      if (lane == 0) last = its, route_counters().gathered = count;
    }
    __syncthreads();
    open = false, cut_key = last.key, cut_end = last.end;
    gathered = count, low = range.from, high = range.to;
  }
  // Finds the cut's key, and gives how many elements with it are kept.
  __device__ unsigned close() {
    const Open range = left_open();
    collect(&left_open().slots, range.from, range.to);
    open = false;
    if (range.by_mass) {
      const Found<Weight> found = search<Weight>(range.from, range.to, Mass{0, 0}, range.rest);
      cut_key = found.key;
      return ties_for(range.rest - found.above, mass_of_few(softmax, value_of(found.key)));
    }
    const Found<Count> found = search<Count>(range.from, range.to, 0u, (unsigned)range.rest.low);
    cut_key = found.key;
    return (unsigned)range.rest.low - found.above;
  }
  __device__ __forceinline__ Mass note_slice() {
    count_pass();
    gather_slice(row, left_open().from, left_open().to, &shared.slice, &left_open().slots);
    return sums_above() ? much_mass_above(row, softmax, left_open().to) : Mass{0, 0};
  }
  __device__ __forceinline__ unsigned resolve() {
    sum_above(note_slice());
    unsigned ties;
    apart([&ties](Kept& kept) { ties = kept.close(); });
    return ties;
  }

  // The least count of elements of mass `each` that reaches `rest`; it exists below 2^32.
  static __device__ __noinline__ unsigned ties_for(Mass rest, u64 each) {
    unsigned low = 1, high = times(each, 1) < rest ? ~0u : 1;
    while (low < high) {
      const unsigned middle = low + (high - low) / 2;
      if (times(each, middle) < rest) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Cuts to what has at least min_p times the greatest probability. By exponents: weights come to an
  // end where exponents do not. They grow with the key, so the least key that suffices is searched
  // for without a look at the row.
  __device__ void min_p(unsigned* ties) {
    const double bound = log((double)limits.min_p);
    unsigned least = kNegInfinityKey + 1, most = best_key;
    while (least < most) {
      const unsigned middle = least + (most - least) / 2;
      if ((double)softmax.exponent(value_of(middle)) >= bound) most = middle;
      else least = middle + 1;
    }
    if (least > cut_key) cut_key = least - 1, cut_end = 0, *ties = 0;
  }

  static __device__ __noinline__ unsigned tie_of_gathered(const Elements* elements, int n, unsigned cut, unsigned nth) {
    const Found<Count> found = pivot_search<Count>(
        n, 0u, ~0u, 0u, nth,
        [elements, cut](int i, unsigned* key) {
          *key = ~elements->positions[i];
          return elements->keys[i] == cut;
        },
        [](int) { return 1u; });
    return ~found.key + 1;
  }

  // Part 4: the position after the `nth` element with the cut's key, nth >= 1.
  __device__ unsigned position_of_tie(unsigned nth) {
    if (cut_key >= low && cut_key <= high && gathered) {
      return tie_of_gathered(&shared.gathered, gathered, cut_key, nth);
    }
    count_pass();
    auto ties = [&](const Vector<T>& v) {
      unsigned count = 0;
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) count += key_of(widen(v.at[w])) == cut_key;
      return count;
    };
    __shared__ unsigned end;
    unsigned before = 0, total;
    if constexpr (C > 1) {
      unsigned own = 0;
#pragma unroll 1
      for (int j = row.begin + threadIdx.x; j < row.end; j += kThreads) own += ties(row.load(j));
      own = block_sum<Count>(own);
      before = team_exclusive_sum<C>(own, 0u, AddSums(), &total);
      if (threadIdx.x == 0) end = 0;
      if (!(before < nth && nth <= before + own)) before = nth;  // another member's
    }
    // Tile by tile in the order of positions.
#pragma unroll 1
    for (int base = row.begin; base < row.end && before < nth; base += kThreads) {
      const int j = base + threadIdx.x;
      unsigned count = 0;
      Vector<T> v;
      if (j < row.end) v = row.load(j), count = ties(v);
      unsigned rank = before + block_exclusive_sum(count, 0u, AddSums(), &total);
      if (rank < nth && nth <= rank + count) {
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) {
          if (key_of(widen(v.at[w])) == cut_key && ++rank == nth) end = row.first(j) + w + 1;
        }
      }
      before += total;
    }
    __syncthreads();
    return team_combine<C>(end, [](unsigned a, unsigned b) { return max(a, b); });
  }
};

template <class T, int C>
template <class M>
__device__ __forceinline__ typename M::Sum Kept<T, C>::measure(const Softmax& softmax, unsigned key) {
  if constexpr (sizeof(typename M::Sum) == sizeof(unsigned)) return 1u;
  else return Mass{mass_of_few(softmax, value_of(key)), 0};
}

template <class T, int C>
template <class M>
__device__ __forceinline__ void Kept<T, C>::tally(const Softmax& softmax, Histogram* histogram, unsigned bin,
                                                  unsigned key) {
  if constexpr (sizeof(typename M::Sum) != sizeof(unsigned)) add_mass(histogram, bin, softmax.mass(value_of(key)));
  else shared_add(&histogram->counts[bin], 1);
}

template <class T, int C>
template <class M>
__device__ __forceinline__ typename M::Sum Kept<T, C>::tallied(int bin) const {
  typename M::Sum sum = M::zero();
#pragma unroll 1
  for (int r = 0; r < Team<C>::size(); r++) {
    const Histogram& h = *Team<C>::at(&shared.histogram, r);
    if constexpr (sizeof(sum) == sizeof(unsigned)) sum = sum + h.counts[bin];
    else sum = sum + Mass{(u64)h.mass1[bin] << 32 | h.mass0[bin], h.mass2[bin]};
  }
  return sum;
}
