// Exact top-k, top-p and min-p of one row by a team of blocks, after Qrita (arXiv 2602.01518).
//
// A kept set is a prefix of the row in descending order, ties by position, so it is described by
// its cut: the key of its last element, and the positions up to which that key is kept. The cut is
// found in four parts; the first three follow the paper's sections 3.1 to 3.3:
//
//  1. Sigma-truncation. A block of sampled logits proposes a threshold that the kept set should lie
//     above: where the set is small, by the order statistics of the sample, which no law of the
//     logits misleads; else by its mean and deviation, as the paper does. One pass over the row, the
//     only one for a set that is found above the threshold, takes the maximum, gathers what reaches
//     the threshold into shared memory, the candidates, and where top-p needs it, sums the weights
//     in f32.
//  2. Where the cut lies among the best 128, a histogram of the candidates finds those, and
//     comparisons of all pairs rank them and give the exact mass above each. The f32 sum decides a
//     top-p only where its error bound admits one answer; else the exact sum is taken in a second
//     pass.
//  3. Pivot search, for larger sets. Where the candidates hold the set (a hit), three pivots at a
//     time split the range of keys that the cut lies in. The range is one of integers, not of
//     values, and before each step it shrinks to the keys that exist in it, so at most 16 steps leave
//     one key, whatever the values; as soon as 32 elements are left in it, a warp ranks them. On a
//     miss, a histogram of the row narrows the range by 2048 at a time until what is in it fits into
//     shared memory, and the search goes on there.
//  4. Duplicates. Of the elements that have the cut's key, those with the lowest positions are
//     kept. The same pivot search, over positions, finds the last of them.
//
// A team's members pass over a slice of the row each; gathered elements are exchanged once, and what
// is on chip every member works through by itself, without a word to the others.
//
// Weights and sums of weights that decide are integers (softmax.cuh): no order of arrival shows.
#pragma once

#include "../common/order.cuh"
#include "../common/philox.cuh"
#include "../common/row.cuh"
#include "../common/softmax.cuh"
#include "../common/team.cuh"

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

constexpr int kSegments = 256;

// The best of a row in order, found first in any order.
constexpr int kTop = 128, kTopBins = 256;
// Threads to an element.
constexpr int kParts = kThreads / kTop;
struct alignas(16) Top {
  // An element's key, and its position's complement: the order as an integer.
  u64 found[kTop], found_mass[kTop];
  u64 ranked[kTop], mass[kTop];
  Mass above[kTop];  // of everything before it in the order
  unsigned bins[kTopBins];
  unsigned slots;
};

// Dynamic shared memory: `shared_bytes` in src/sampling/cuda.rs. A member of a larger team collects
// its slice's part first, and then everybody's.
template <int C>
struct alignas(16) Shared {
  Top top;
  Elements gathered;
  union {
    Elements slice;
    Histogram histogram;
    Mass segments[kSegments];
  };
};
template <>
struct alignas(16) Shared<1> {
  Top top;
  union {
    Elements gathered;
    Elements slice;
    Histogram histogram;
    Mass segments[kSegments];
  };
};
static_assert(sizeof(Shared<1>) == 7184 + (32 << 10) && sizeof(Shared<8>) == 7184 + (64 << 10),
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
      for (int other = 0; other < 32; other++) {
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

// The truncation of one row. Every member is uniform over the team.
template <class T, int C>
struct Kept {
  // Loads in flight for a pass that does little else, and for one that computes.
  static constexpr int kLight = 4, kHeavy = 1;

  // The sample: a few vectors a thread, evenly from the row.
  struct Sampled {
    static constexpr int kSize = 4096;
    static constexpr int kVectors = kSize / kThreads / Row<T>::kWidth;
    Vector<T> vectors[kVectors];

    __device__ explicit Sampled(const Row<T>& row) {
#pragma unroll
      for (int i = 0; i < kVectors; i++) {
        const int at = threadIdx.x + i * kThreads;
        vectors[i] = row.load((int)((long long)at * row.vectors() / (kThreads * kVectors)));
      }
    }
    __device__ __forceinline__ float operator()(int i, int w) const { return widen(vectors[i].at[w]); }
  };

  const Row<T> row;
  Truncation limits;
  Shared<C>& shared;
  Softmax softmax;

  unsigned best_key, best_position;
  unsigned numbers;  // how many logits are above -inf; where these exceed k, at least as many as k
  bool has_nan, has_infinity;

  // The cut: an element is kept where its key is greater, or equal at a position below `end`.
  unsigned cut_key, cut_end;

  // How many are kept, where `shared.top` holds them, in order; else 0.
  unsigned members;

  // Shared memory holds the `gathered` elements of the whole row whose keys lie in [low, high].
  unsigned low, high;
  int gathered;

  __device__ Kept(const Request& r, Shared<C>& shared)
      : row(static_cast<const T*>(r.logits) + row_index() * r.row_stride, r.vocab, Team<C>::rank(), Team<C>::size()),
        shared(shared),
        softmax(0.0f, 1.0f) {
    // Loads that wait for nothing go out together.
    const Sampled sampled(row);
    limits = Truncation(r, row_index());
    row.prefetch();
    if (threadIdx.x == 0) route_counters() = RouteCounters{0, 0, 0, 0};
    find_cut(r.joint, sampled);
    if (r.routes && threadIdx.x == 0 && Team<C>::rank() == 0) {
      RouteCounters counters = route_counters();
      if (numbers > 0 && on_chip()) counters.route |= kHit;
      if (cut_key == kNegInfinityKey && cut_end == 0) counters.route |= kNoTruncation;
      reinterpret_cast<RouteCounters*>(r.routes)[row_index()] = counters;
    }
  }

  static __device__ __forceinline__ long long row_index() { return blockIdx.x / Team<C>::size(); }

  __device__ __forceinline__ bool holds(float x, int position) const {
    const unsigned key = key_of(x);
    return key > cut_key || (key == cut_key && (unsigned)position < cut_end);
  }

  // Whether shared memory holds the whole kept set.
  __device__ bool on_chip() const {
    return high == ~0u && (cut_end ? cut_key >= low : cut_key + 1 >= low);
  }

  // The number and the mass of the kept elements.
  __device__ void count_and_mass(unsigned* count, Mass* mass) const {
    Mass sum = {0, 0};
    unsigned own = 0;
    if (members) {
      *count = members;
      *mass = shared.top.above[members - 1] + Mass{shared.top.mass[members - 1], 0};
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
      row.template for_each<kHeavy>([&](float x, int position) {
        if (holds(x, position)) sum = sum + Mass{softmax.mass(x), 0}, own++;
      });
      *mass = team_combine<C>(block_sum<Weight>(sum), AddSums());
      *count = team_combine<C>(block_sum<Count>(own), AddSums());
    }
  }

 private:
  __device__ void find_cut(int joint, const Sampled& sampled) {
    members = 0;
    const Proposal proposal = propose(sampled);
    const bool limited = limits.top_k > 0 && limits.top_k < (unsigned)row.size;
    // Whether `numbers` is exact.
    bool counted = limited && !proposal.gathers;
    Part part = {0.0f, 0.0f, 0.0f};
    if (counted) {
      forget();
      count_all();
    } else {
      part = pass(proposal, sums(joint));
      counted = gathered && low <= kNegInfinityKey + 1;
      if (has_nan || has_infinity || best_key <= kNegInfinityKey) count_all(), counted = true;
    }
    cut_key = ~0u, cut_end = 0;
    if (numbers == 0) return;
    softmax = Softmax(value_of(best_key), limits.temperature);
    if (gathered && rank_top(joint, part, proposal.reference)) return;
    if constexpr (C > 1) Team<C>::sync();  // The slices are free again.

    if (limited && numbers < limits.top_k && !counted) count_all();
    cut_key = kNegInfinityKey;
    if (limits.top_k == 1) {
      if (best_position == ~0u) count_all();
      cut_key = best_key, cut_end = best_position + 1;
      return;
    }
    const unsigned k = limited && limits.top_k < max(numbers, gathered + 1u) ? limits.top_k : 0;
    unsigned ties = 0;  // how many elements with the cut's key are kept; 0 where it's exclusive
    if (k) {
      const Found<Count> found = locate<Count>(kNegInfinityKey + 1, best_key, 0u, k);
      cut_key = found.key, ties = k - found.above;
    }
    if (limits.top_p < 1.0f) top_p(joint, &ties);
    if (limits.min_p > 0.0f) min_p(&ties);
    if (ties) cut_end = position_of_tie(ties);
  }

  // Whether the pass sums the weights: where a top-p refers to more than a top-k leaves.
  __device__ bool sums(int joint) const {
    return limits.top_p < 1.0f && limits.top_k != 1 && (joint || !(limits.top_k > 0 && limits.top_k < (unsigned)row.size));
  }

  // What the sample says: gather what reaches the threshold, or nothing. It decides the route, never
  // the result.
  struct Proposal {
    float threshold;
    bool gathers;
    float reference;  // the greatest logit of the sample
  };

  // Part 1, the sample.
  __device__ Proposal propose(const Sampled& x) {
    constexpr int kSampled = Sampled::kVectors;
    constexpr int kGroups = 64, kGroup = kThreads / kGroups, kShare = 32 / kGroup;
    __shared__ float maxima[kGroups], nth_greatest;
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
    // The nth of the groups' maxima: about the nth of the sample, or a little below.
    const auto nth_maximum = [&](int nth) {
      const int mine = threadIdx.x / 32 * kShare + lane / kGroup;
      int before = 0;
#pragma unroll
      for (int i = 0; i < kGroups / kGroup; i++) {
        const int other = i * kGroup + lane % kGroup;
        before += maxima[other] > maxima[mine] || (maxima[other] == maxima[mine] && other < mine);
      }
#pragma unroll
      for (int lanes = kGroup / 2; lanes > 0; lanes /= 2) before += __shfl_xor_sync(~0u, before, lanes);
      if (before == nth - 1 && lane % kGroup == 0) nth_greatest = maxima[mine];
      __syncthreads();
      return nth_greatest;
    };
    const auto above = [&](float threshold) {
      return Proposal{fmaxf(threshold, -CUDART_MAX_NORMAL_F), true, reference};
    };
    // Everything above -inf fits, or may.
    if (row.size <= kCandidates || reference == -CUDART_INF_F) return above(-CUDART_MAX_NORMAL_F);
    const bool by_count = limits.top_k > 0 && limits.top_k < (unsigned)row.size;
    const bool by_mass = limits.top_p < 1.0f;
    if (!by_count && !by_mass) {
      if (!(limits.min_p > 0.0f)) return {0.0f, false, reference};
      return above(reference + limits.temperature * (logf(limits.min_p) - 1e-3f));
    }
    // How many logits one of the sample stands for.
    const float each = (float)row.size / Sampled::kSize;
    if (limits.top_k == 1) return above(reference);
    int nth;
    if (by_count) {
      // Fewer than k reach it about once in 100,000 rows.
      nth = (int)fminf(2.0f * limits.top_k / each + 7.0f, 64.0f);
      if (nth <= 48) return above(nth_maximum(nth));
      if (limits.top_k > kCandidates / 2) return {0.0f, false, reference};
    } else {
      nth = (int)fminf(fmaxf(768.0f / each, 4.0f), 40.0f);
    }

    // What lies far below weighs nothing, and fill values would drown the deviation.
    const float floor = reference - 128.0f * fmaxf(limits.temperature, 1.0f);
    const float threshold = by_count ? CUDART_INF_F : nth_maximum(nth);
    const float scale = CUDART_L2E_F / limits.temperature;
    // Moments about the best: one pass, and no cancellation to speak of. Weights of all, and of what
    // is not gathered.
    struct Moments {
      float n, sum, squares, whole, rest;
    } m = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSampled; i++) {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        const float d = x(i, w) - reference;
        if (x(i, w) > floor && x(i, w) < CUDART_INF_F) m.n += 1.0f, m.sum += d, m.squares += d * d;
        const float weight = exp2_approx(d * scale);
        m.whole += weight;
        if (x(i, w) < threshold) m.rest += weight;
      }
    }
    m = block_reduce(m, [](Moments a, Moments b) {
      return Moments{a.n + b.n, a.sum + b.sum, a.squares + b.squares, a.whole + b.whole, a.rest + b.rest};
    });
    if (!by_count && m.rest < 0.8f * (1.0f - limits.top_p) * m.whole) return above(threshold);
    const float mean = m.sum / m.n;
    const float sigma = sqrtf(fmaxf(m.squares / m.n - mean * mean, 0.0f));
    const float size = m.n * each;
    // The deviation that about `count` elements exceed.
    auto quantile = [&](float count) { return -normcdfinvf(fminf(count / size, 0.5f)); };
    float delta;
    if (by_count) {
      delta = 0.8f * quantile((float)limits.top_k);  // the paper's margin
      delta = fmaxf(delta, quantile(0.5f * (limits.top_k + kCandidates)));
    } else {
      // Under softmax a normal law is a normal law about its mean plus sigma squared.
      delta = sigma / limits.temperature - normcdfinvf(limits.top_p);
      delta -= 0.2f * fabsf(delta);
      // Where more are kept than fit, by this law: greater logits that the sample has missed may
      // still outweigh it.
      if (delta < quantile(kCandidates)) return above(threshold);
      delta = fmaxf(delta, quantile(0.5f * kCandidates));
    }
    const float proposed = reference + mean + delta * sigma;
    // No statistics (no number in the sample, infinite ones): nothing is gathered.
    if (!(proposed > -CUDART_INF_F)) return {0.0f, false, reference};
    return above(fminf(proposed, reference));
  }

  struct Part {
    float best;
    // The weights, and the weights times what their exponents come to: how far rounding may reach.
    float sum, tilt;
  };

  // A thread's part of the pass. By itself, with nothing by reference, so that the loop has all
  // registers and its vectors never go through memory.
  template <bool kSums>
  static __device__ __noinline__ Part scan_slice(const Row<T> row, float threshold, float reference,
                                                 float scale, Elements* slice, unsigned* slots) {
    float best = -CUDART_INF_F, sum = 0.0f, carry = 0.0f, tilt = 0.0f;
    row.template for_each_vector<kLight>([&](const Vector<T>& v, int first) {
      float most = widen(v.at[0]);
#pragma unroll
      for (int w = 1; w < Row<T>::kWidth; w++) most = max_or_nan(most, widen(v.at[w]));
      best = max_or_nan(best, most);
      if constexpr (kSums) {
        float weights[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) {
          // 2^-200 is 0, and -inf times 0 would be NaN.
          const float exponent = fmaxf((widen(v.at[w]) - reference) * scale, -200.0f);
          const float weight = exp2_approx(exponent);
          weights[w % 4] += weight, tilt += weight * fabsf(exponent);
        }
        // With the rounding of each sum carried into the next (Kahan).
        const float more = (weights[0] + weights[1]) + (weights[2] + weights[3]) - carry;
        const float next = sum + more;
        carry = (next - sum) - more, sum = next;
      }
      // NaN hides what is beside it: then the row is looked at again. A full buffer takes no more.
      if (most >= threshold && *(volatile unsigned*)slots <= kCandidates) {
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) {
          const float x = widen(v.at[w]);
          if (x >= threshold) {
            const unsigned slot = atomicAdd(slots, 1u);
            if (slot < kCandidates) slice->keys[slot] = key_of(x), slice->positions[slot] = first + w;
          }
        }
      }
    });
    return {best, sum, tilt};
  }

  // Part 1, the pass: the maximum, the elements that reach the threshold, and the f32 sum of weights
  // relative to the reference. What is rare (NaN, +inf) is only noticed.
  __device__ Part pass(const Proposal& proposal, bool sums_weights) {
    __shared__ unsigned slots;
    __shared__ Part parts[kWarps];
    __shared__ struct Said {
      Part part;
      unsigned slots;
    } said;
    if (threadIdx.x == 0) slots = 0;
    __syncthreads();
    count_pass();

    const float threshold = proposal.gathers ? proposal.threshold : CUDART_INF_F;
    Part part = sums_weights
        ? scan_slice<true>(row, threshold, proposal.reference, CUDART_L2E_F / limits.temperature,
                           &shared.slice, &slots)
        : scan_slice<false>(row, threshold, 0.0f, 0.0f, &shared.slice, &slots);
    const auto combine = [](Part a, Part b) {
      return Part{max_or_nan(a.best, b.best), a.sum + b.sum, a.tilt + b.tilt};
    };
    part = warp_reduce(part, combine);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
    __syncthreads();
    part = warp_reduce<kWarps>(parts[threadIdx.x % kWarps], combine);
    unsigned total = slots;
    if constexpr (C > 1) {
      if (threadIdx.x == 0) said = {part, slots};
      Team<C>::sync();
      // Lane r hears member r; then a few warps copy from each.
      const int lane = threadIdx.x % 32, size = Team<C>::size();
      Said its = {{-CUDART_INF_F, 0.0f, 0.0f}, 0};
      if (lane < size) its = *Team<C>::at(&said, lane);
      part = warp_reduce(its.part, combine);
      total = __reduce_add_sync(~0u, its.slots);
      if (total <= kCandidates) {
        const int member = threadIdx.x / 32 % size;
        const unsigned place = __reduce_add_sync(~0u, lane < member ? its.slots : 0);
        const unsigned count = __shfl_sync(~0u, its.slots, member);
        const Elements* slice = Team<C>::at(&shared.slice, member);
#pragma unroll 1
        for (unsigned i = threadIdx.x / 32 / size * 32 + lane; i < count; i += kThreads / size) {
          shared.gathered.keys[place + i] = slice->keys[i];
          shared.gathered.positions[place + i] = slice->positions[i];
        }
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) route_counters().gathered = total;
    if (proposal.gathers && total <= kCandidates) {
      gathered = total, low = key_of(threshold), high = ~0u;
    } else {
      forget();
    }
    has_nan = part.best != part.best, has_infinity = part.best == CUDART_INF_F;
    if (has_nan) forget();
    best_key = key_of(part.best), best_position = ~0u;
    numbers = gathered;
    if (numbers == 0 && best_key > kNegInfinityKey) numbers = 1;
    return part;
  }

  // Counts what is above -inf, and finds the first of the greatest: for rows with few numbers, NaN or
  // infinities, and where nothing was gathered.
  __device__ void count_all() {
    float best = -CUDART_INF_F;
    int position = 0;
    unsigned above = 0, flags = 0;
    count_pass();
    row.template for_each<kLight>([&](float x, int i) {
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

  // Part 2: the cut, where it lies among the best kTop. `passed` is the pass's result, its weights
  // relative to `reference`.
  __device__ bool rank_top(int joint, const Part& passed, float reference) {
    Top& top = shared.top;
    const bool whole_row = low <= kNegInfinityKey + 1;
    unsigned count = gathered, edge = low;
    if (threadIdx.x == 0) top.slots = 0;
    if (count > kTop) {
      if (threadIdx.x < kTopBins) top.bins[threadIdx.x] = 0;
      __syncthreads();
      const unsigned range = best_key - low;
      const int shift = max(0, 24 - __clz(range | 1));
#pragma unroll 1
      for (int i = threadIdx.x; i < gathered; i += kThreads) {
        atomicAdd(&top.bins[(shared.gathered.keys[i] - low) >> shift], 1u);
      }
      __syncthreads();
      // How many bins from the top hold no more than kTop, or the first k. Every warp finds out by
      // itself.
      constexpr int kEach = kTopBins / 32;
      const int lane = threadIdx.x % 32;
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
      const unsigned enough = limits.top_k > 0 ? min(limits.top_k, kTop) : kTop;
      unsigned running = inclusive - own, admitted = 0, bins = 0;
#pragma unroll
      for (int b = 0; b < kEach; b++) {
        const bool wanted = running < enough;
        running += counts[b];
        if (wanted && running <= kTop) bins++, admitted = running;
      }
      bins = __reduce_add_sync(~0u, bins), count = __reduce_max_sync(~0u, admitted);
      if (count == 0) return false;
      edge = low + ((kTopBins - bins) << shift);
    }
    const bool limited = limits.top_k > 0 && limits.top_k < (unsigned)row.size;
    if (limited && limits.top_k > count && !(whole_row && count == gathered)) return false;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < gathered; i += kThreads) {
      const unsigned key = shared.gathered.keys[i];
      if (key >= edge) {
        const unsigned slot = atomicAdd(&top.slots, 1u);
        top.found[slot] = (u64)key << 32 | ~shared.gathered.positions[i];
        top.found_mass[slot] = softmax.mass_of_few(value_of(key));
      }
    }
    __syncthreads();
    count_step();
    // A part of the comparisons of an element each.
    const unsigned element = threadIdx.x / kParts, part = threadIdx.x % kParts;
    const u64 mine = element < count ? top.found[element] : ~0ull;
    unsigned rank = 0;
    Mass above = {0, 0};
#pragma unroll 4
    for (unsigned other = part; other < count; other += kParts) {
      const bool greater = top.found[other] > mine;
      rank += greater, above = above + Mass{greater ? top.found_mass[other] : 0, 0};
    }
    above = warp_reduce<kParts>(above, AddSums()), rank = warp_reduce<kParts>(rank, AddSums());
    if (element < count && part == 0) {
      top.ranked[rank] = mine, top.mass[rank] = top.found_mass[element], top.above[rank] = above;
    }
    __syncthreads();

    // The kept are the first `kept`; `closed` where that holds whatever lies below the edge.
    unsigned kept = limited ? min(limits.top_k, count) : count;
    bool closed = limited || (whole_row && count == gathered);
    const auto up_to = [&](unsigned r) { return top.above[r - 1] + Mass{top.mass[r - 1], 0}; };
    const bool mine_ranked = threadIdx.x < count;
    if (limits.top_p < 1.0f && limits.top_k != 1) {
      const auto reached = [&](Mass target) {
        return (unsigned)__syncthreads_count(mine_ranked && top.above[threadIdx.x] < target);
      };
      Mass whole;
      bool exact = true;
      if (limited && !joint) whole = up_to(kept);
      else if (whole_row && count == gathered) whole = up_to(count);
      else exact = false;
      if (!exact) {
        Mass least, most;
        if (!bounds(passed, reference, &least, &most)) {
          whole = mass_above(kNegInfinityKey), exact = true;
        } else {
          const Mass target = nucleus(limits.top_p, most);
          const unsigned fewest = min(kept, reached(nucleus(limits.top_p, least)));
          const unsigned ends = min(kept, reached(target));
          if (!closed && up_to(count) < target) {
            // Beyond the edge, or so close to it that only the exact sum tells.
            return false;
          }
          if (fewest == ends) kept = ends, closed = true;
          else whole = mass_above(kNegInfinityKey), exact = true;
        }
      }
      if (exact) {
        const Mass target = nucleus(limits.top_p, whole);
        const unsigned ends = reached(target);
        if (!closed && up_to(count) < target) return false;
        kept = min(kept, ends), closed = true;
      }
    }
    if (limits.min_p > 0.0f) {
      const double bound = log((double)limits.min_p);
      const bool enough =
          mine_ranked && (double)softmax.exponent(value_of(top.ranked[threadIdx.x] >> 32)) >= bound;
      const unsigned ends = __syncthreads_count(enough);
      closed |= ends < count;
      kept = min(kept, ends);
    }
    if (!closed) return false;
    members = kept;
    cut_key = top.ranked[kept - 1] >> 32, cut_end = ~(unsigned)top.ranked[kept - 1] + 1;
    best_position = ~(unsigned)top.ranked[0];
    return true;
  }

  // Bounds of the exact sum of weights, from the pass's f32 sum relative to the reference; false where
  // there are none. In units of the last place (2^-24), relative: an exponent of the f32 sum is off by
  // at most 4 times itself, one of the exact weights by 2; `tilt` has them all, as powers of two. A
  // weight is off by 4 in the one sum and in the other, and a carried sum, with the tree that joins
  // the threads', by 20; the rest is slack.
  __device__ bool bounds(const Part& passed, float reference, Mass* least, Mass* most) const {
    const double max = value_of(best_key), sum = passed.sum;
    const double beyond = (max - (double)reference) / (double)limits.temperature;  // at least 0
    if (!(beyond < 60.0) || !(sum > 0.0 && sum < 1e30) || !(passed.tilt < 1e30f) || !(max < 1e30) ||
        !(reference > -1e30f)) {
      return false;
    }
    constexpr double kUnit = 1.0 / (1 << 24), kLn2 = 0.6931471805599453;
    const double tilt = 1.05 * passed.tilt / sum * kLn2;
    const double error = kUnit * (6.0 * tilt + 2.0 * beyond + 40.0);
    const double weights = sum * exp(-beyond);
    *least = to_mass(weights * (1.0 - error)), *most = to_mass(weights * (1.0 + error));
    return true;
  }

  // Notes an element of the slice, if there is room.
  __device__ __forceinline__ void push(unsigned* slots, unsigned key, int position) {
    const auto group = cooperative_groups::coalesced_threads();
    unsigned slot = 0;
    if (group.thread_rank() == 0) slot = atomicAdd(slots, group.size());
    slot = group.shfl(slot, 0) + group.thread_rank();
    if (slot < kCandidates) shared.slice.keys[slot] = key, shared.slice.positions[slot] = position;
  }

  // Makes what the members have pushed, all elements with keys in [from, to], common to all;
  // forgets it where it does not fit.
  __device__ void collect(unsigned* slots, unsigned from, unsigned to) {
    __syncthreads();
    unsigned total;
    team_exclusive_sum<C>(*slots, 0u, AddSums(), &total);
    if (threadIdx.x == 0) route_counters().gathered = total;
    if (total > kCandidates) {
      forget();
      return;
    }
    if constexpr (C > 1) {
      unsigned place = 0;
      for (int r = 0; r < Team<C>::size(); r++) {
        const Elements* slice = Team<C>::at(&shared.slice, r);
        const unsigned count = *Team<C>::at(slots, r);
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < count; i += kThreads) {
          shared.gathered.keys[place + i] = slice->keys[i];
          shared.gathered.positions[place + i] = slice->positions[i];
        }
        place += count;
      }
      Team<C>::sync();  // The slices are free again.
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
    return narrow<M>(from, to, above, target);
  }

  template <class M>
  __device__ __forceinline__ typename M::Sum measure(unsigned key) const;

  template <class M>
  __device__ Found<M> search(unsigned from, unsigned to, typename M::Sum above,
                             typename M::Sum target) {
    return pivot_search<M>(
        gathered, from, to, above, target,
        [&](int i, unsigned* key) {
          *key = shared.gathered.keys[i];
          return true;
        },
        [&](int i) { return measure<M>(shared.gathered.keys[i]); });
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
      row.template for_each<kHeavy>([&](float x, int) {
        const unsigned key = key_of(x);
        if (key >= from && key <= to) tally<M>((key - from) >> shift, key);
      });
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
        row.template for_each<kLight>([&](float x, int i) {
          const unsigned key = key_of(x);
          if (key >= from && key <= to) push(&slots, key, i);
        });
        collect(&slots, from, to);
        return search<M>(from, to, above, target);
      }
    }
  }

  template <class M>
  __device__ __forceinline__ void tally(unsigned bin, unsigned key);
  // A bin's sum over the team.
  template <class M>
  __device__ __forceinline__ typename M::Sum tallied(int bin) const;

  // The mass of everything with a greater key.
  __device__ Mass mass_above(unsigned key) const {
    Mass sum = {0, 0};
    if (high == ~0u && gathered && key + 1 >= low) {
#pragma unroll 1
      for (int i = threadIdx.x; i < gathered; i += kThreads) {
        const unsigned its = shared.gathered.keys[i];
        if (its > key) sum = sum + measure<Weight>(its);
      }
      return block_sum<Weight>(sum);
    }
    count_pass(kSecondPass);
    row.template for_each<kHeavy>([&](float x, int) {
      if (key_of(x) > key) sum = sum + Mass{softmax.mass(x), 0};
    });
    return team_combine<C>(block_sum<Weight>(sum), AddSums());
  }

  // Cuts to the nucleus. Before, `ties` elements at the cut's key are kept, or it is exclusive.
  __device__ void top_p(int joint, unsigned* ties) {
    const bool limited = *ties > 0;
    const u64 each = limited ? softmax.mass_of_few(value_of(cut_key)) : 0;
    const Mass above = limited ? mass_above(cut_key) : Mass{0, 0};
    Mass kept = above + times(each, *ties);
    const Mass whole = limited && !joint ? kept : mass_above(kNegInfinityKey);
    if (!limited) kept = whole;
    const Mass target = nucleus(limits.top_p, whole);
    if (kept < target) return;
    if (limited && above < target) {
      *ties = min(*ties, ties_for(target - above, each));
      return;
    }
    const Found<Weight> found = locate<Weight>(cut_key + 1, best_key, Mass{0, 0}, target);
    cut_key = found.key;
    *ties = ties_for(target - found.above, softmax.mass_of_few(value_of(found.key)));
  }

  // The least count of elements of mass `each` that reaches `rest`; it exists below 2^32.
  static __device__ __noinline__ unsigned ties_for(Mass rest, u64 each) {
    unsigned low = 1, high = ~0u;
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
    if (least > cut_key) cut_key = least - 1, *ties = 0;
  }

  // Part 4: the position after the `nth` element with the cut's key, nth >= 1.
  __device__ unsigned position_of_tie(unsigned nth) {
    if (cut_key >= low && cut_key <= high && gathered) {
      const Found<Count> found = pivot_search<Count>(
          gathered, 0u, ~0u, 0u, nth,
          [&](int i, unsigned* key) {
            *key = ~shared.gathered.positions[i];
            return shared.gathered.keys[i] == cut_key;
          },
          [](int) { return 1u; });
      return ~found.key + 1;
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
__device__ __forceinline__ typename M::Sum Kept<T, C>::measure(unsigned key) const {
  if constexpr (sizeof(typename M::Sum) == sizeof(unsigned)) return 1u;
  else return Mass{softmax.mass_of_few(value_of(key)), 0};
}

template <class T, int C>
template <class M>
__device__ __forceinline__ void Kept<T, C>::tally(unsigned bin, unsigned key) {
  Histogram& histogram = shared.histogram;
  atomicAdd(&histogram.counts[bin], 1u);
  if constexpr (sizeof(typename M::Sum) != sizeof(unsigned)) {
    const u64 mass = softmax.mass(value_of(key));
    const unsigned low = (unsigned)mass;
    const unsigned carry = atomicAdd(&histogram.mass0[bin], low) > ~low;
    // A mass is at most 2^62, so its upper word takes the carry.
    const unsigned high = (unsigned)(mass >> 32) + carry;
    if (high && atomicAdd(&histogram.mass1[bin], high) > ~high) atomicAdd(&histogram.mass2[bin], 1u);
  }
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
