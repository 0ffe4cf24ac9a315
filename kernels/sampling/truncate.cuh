// Exact top-k, top-p and min-p of one row by a team of blocks, after Qrita (arXiv 2602.01518).
//
// A kept set is a prefix of the row in descending order, ties by position, so it is described by
// its cut: the key of its last element, and the positions up to which that key is kept. The cut is
// found in three parts, which follow the paper's sections 3.1 to 3.3:
//
//  1. Sigma-truncation. Mean and deviation of a block of sampled logits propose a threshold that
//     the kept set should lie above. One pass over the row finds the best element, counts what is
//     above -inf, and gathers what reaches the threshold into shared memory, the candidates.
//  2. Pivot search. Where the candidates hold the set (a hit), three pivots at a time split the
//     range of keys that the cut lies in. The range is one of integers, not of values, and before
//     each step it shrinks to the keys that exist in it, so at most 16 steps leave one key,
//     whatever the values; as soon as 32 elements are left in it, a warp ranks them. On a miss, a
//     histogram of the row narrows the range by 2048 at a time until what is in it fits into
//     shared memory, and the search goes on there.
//  3. Duplicates. Of the elements that have the cut's key, those with the lowest positions are
//     kept. The same pivot search, over positions, finds the last of them.
//
// A team's members pass over a slice of the row each; gathered elements are exchanged once, and what
// is on chip every member works through by itself, without a word to the others.
//
// Fused: the first pass does the truncation, the maximum for the softmax, and the flags of special
// rows. Weights and sums of weights are integers (softmax.cuh): no order of arrival shows.
#pragma once

#include "../common/order.cuh"
#include "../common/philox.cuh"
#include "../common/row.cuh"
#include "../common/softmax.cuh"
#include "../common/team.cuh"

// Candidates that fit on chip: 64 KB of dynamic shared memory, which every device of sm_80 and
// later has, twice on most.
constexpr int kCandidates = 8192;
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

// Dynamic shared memory: `shared_bytes` in src/sampling/cuda.rs. A member of a larger team collects
// its slice's part first, and then everybody's.
template <int C>
struct alignas(16) Shared {
  Elements gathered;
  union {
    Elements slice;
    Histogram histogram;
    Mass segments[kSegments];
  };
};
template <>
struct alignas(16) Shared<1> {
  union {
    Elements gathered;
    Elements slice;
    Histogram histogram;
    Mass segments[kSegments];
  };
};
static_assert(sizeof(Shared<1>) == 64 << 10 && sizeof(Shared<8>) == 128 << 10,
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
  return M::warp(parts[threadIdx.x % 32]);
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
    for (int s = 0; s < 3; s++) sums[s] = M::warp(step.sums[s][lane]);
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
  // Loads in flight for a pass that only compares: 16 elements a thread.
  static constexpr int kLight = 16 / Row<T>::kWidth;

  const Row<T> row;
  const Truncation limits;
  Shared<C>& shared;
  Softmax softmax;

  unsigned best_key, best_position;
  unsigned numbers;  // how many logits are above -inf
  bool has_nan, has_infinity;

  // The cut: an element is kept where its key is greater, or equal at a position below `end`.
  unsigned cut_key, cut_end;

  // Shared memory holds the `gathered` elements of the whole row whose keys lie in [low, high].
  unsigned low, high;
  int gathered;

  __device__ Kept(const Request& r, Shared<C>& shared)
      : row(static_cast<const T*>(r.logits) + row_index() * r.row_stride, r.vocab, Team<C>::rank(), C),
        limits(r, row_index()),
        shared(shared),
        softmax(0.0f, 1.0f) {
    if (threadIdx.x == 0) route_counters() = RouteCounters{0, 0, 0, 0};
    find_cut(r.joint);
    if (r.routes && threadIdx.x == 0 && Team<C>::rank() == 0) {
      RouteCounters counters = route_counters();
      if (numbers > 0 && on_chip()) counters.route |= kHit;
      if (cut_key == kNegInfinityKey && cut_end == 0) counters.route |= kNoTruncation;
      reinterpret_cast<RouteCounters*>(r.routes)[row_index()] = counters;
    }
  }

  static __device__ __forceinline__ long long row_index() { return blockIdx.x / C; }

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
    unsigned members = 0;
    if (on_chip()) {
#pragma unroll 1
      for (int i = threadIdx.x; i < gathered; i += kThreads) {
        const unsigned key = shared.gathered.keys[i];
        if (holds(value_of(key), shared.gathered.positions[i])) {
          sum = sum + measure<Weight>(key), members++;
        }
      }
      *mass = block_sum<Weight>(sum), *count = block_sum<Count>(members);
    } else {
      row.template for_each<1>([&](float x, int position) {
        if (holds(x, position)) sum = sum + Mass{softmax.mass(x), 0}, members++;
      });
      *mass = team_combine<C>(block_sum<Weight>(sum), AddSums());
      *count = team_combine<C>(block_sum<Count>(members), AddSums());
    }
  }

 private:
  __device__ void find_cut(int joint) {
    scan();
    if (numbers == 0) {
      cut_key = ~0u, cut_end = 0;
      return;
    }
    softmax = Softmax(value_of(best_key), limits.temperature);
    cut_key = kNegInfinityKey, cut_end = 0;
    if (limits.top_k == 1) {
      cut_key = best_key, cut_end = best_position + 1;
      return;
    }
    const unsigned k = limits.top_k < numbers ? limits.top_k : 0;
    unsigned ties = 0;  // how many elements with the cut's key are kept; 0 where it's exclusive
    if (k) {
      const Found<Count> found = locate<Count>(kNegInfinityKey + 1, best_key, 0u, k);
      cut_key = found.key, ties = k - found.above;
    }
    if (limits.top_p < 1.0f) top_p(joint, &ties);
    if (limits.min_p > 0.0f) min_p(&ties);
    if (ties) cut_end = position_of_tie(ties);
  }

  // Part 1: the proposal and the pass over the row.
  __device__ void scan() {
    const float threshold = proposal();
    __shared__ unsigned slots;
    if (threadIdx.x == 0) slots = 0;
    __syncthreads();

    float best = -CUDART_INF_F;
    int position = 0;
    unsigned above = 0, flags = 0;
    count_pass();
    row.template for_each<kLight>([&](float x, int i) {
      if (x > best) best = x, position = i;
      above += x > -CUDART_INF_F;
      if (x != x && i >= 0 && i < row.size) flags |= 1;
      if (x >= threshold) push(&slots, key_of(x), i);
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
    has_nan = summary.flags, has_infinity = value_of(best_key) == CUDART_INF_F;
    if (threshold == CUDART_INF_F) forget();
    else collect(&slots, key_of(threshold), ~0u);
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
      for (int r = 0; r < C; r++) {
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

  // A threshold that the kept set should lie above, by a normal law with the mean and deviation of
  // a sample of the row; +inf where nothing is to be gathered. It decides the route, never the
  // result.
  __device__ float proposal() const {
    // Everything above -inf fits.
    if (row.size <= kCandidates) return -CUDART_MAX_NORMAL_F;
    const bool by_count = limits.top_k > 0 && limits.top_k < (unsigned)row.size;
    if (limits.top_k == 1 || (!by_count && limits.top_p >= 1.0f)) return CUDART_INF_F;
    if (by_count && limits.top_k > kCandidates / 2) return CUDART_INF_F;

    constexpr int kWidth = Row<T>::kWidth;
    const int j = (int)((long long)threadIdx.x * row.vectors() / kThreads);
    const Vector<T> v = row.load(j);
    float best = -CUDART_INF_F;
#pragma unroll
    for (int w = 0; w < kWidth; w++) best = fmaxf(best, widen(v.at[w]));
    best = block_reduce(best, [](float a, float b) { return fmaxf(a, b); });
    // What lies this far below weighs nothing, and fill values would drown the deviation.
    const float floor = best - 128.0f * fmaxf(limits.temperature, 1.0f);
    // Moments about the best: one pass, and no cancellation to speak of.
    struct Moments {
      float n, sum, squares;
    } m = {0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kWidth; w++) {
      const float x = widen(v.at[w]);
      if (x > floor && x < CUDART_INF_F) m.n += 1.0f, m.sum += x - best, m.squares += (x - best) * (x - best);
    }
    m = block_reduce(m, [](Moments a, Moments b) {
      return Moments{a.n + b.n, a.sum + b.sum, a.squares + b.squares};
    });
    const float mean = m.sum / m.n;
    const float sigma = sqrtf(fmaxf(m.squares / m.n - mean * mean, 0.0f));

    const float size = row.size * (m.n / (kThreads * kWidth));
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
      delta = fmaxf(delta, quantile(0.5f * kCandidates));
    }
    const float threshold = best + mean + delta * sigma;
    // No statistics (no number in the sample, infinite ones): nothing is gathered.
    return threshold > -CUDART_INF_F ? threshold : CUDART_INF_F;
  }

  // Part 2: the key at which the measure, taken in descending order from `to`, reaches the target;
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
      row.template for_each<1>([&](float x, int) {
        const unsigned key = key_of(x);
        if (key >= from && key <= to) tally<M>((key - from) >> shift, key);
      });
      Team<C>::sync();
      // Thread t looks at the bins 2t and 2t + 1 from the top.
      const int upper = kBins - 1 - 2 * threadIdx.x, lower = upper - 1;
      const Sum own[2] = {tallied<M>(upper), tallied<M>(lower)};
      Sum total;
      Sum before = above + block_exclusive_sum(own[0] + own[1], M::zero(), AddSums(), &total);
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
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
    if (high == ~0u && gathered && key >= low) {
#pragma unroll 1
      for (int i = threadIdx.x; i < gathered; i += kThreads) {
        const unsigned its = shared.gathered.keys[i];
        if (its > key) sum = sum + measure<Weight>(its);
      }
      return block_sum<Weight>(sum);
    }
    count_pass(kSecondPass);
    row.template for_each<1>([&](float x, int) {
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

  // Cuts to what weighs at least min_p. The weight grows with the key, so the least key that does
  // is searched for without a look at the row.
  __device__ void min_p(unsigned* ties) {
    unsigned least = kNegInfinityKey + 1, most = best_key;
    while (least < most) {
      const unsigned middle = least + (most - least) / 2;
      if (softmax.weight(value_of(middle)) >= limits.min_p) most = middle;
      else least = middle + 1;
    }
    if (least > cut_key) cut_key = least - 1, *ties = 0;
  }

  // Part 3: the position after the `nth` element with the cut's key, nth >= 1.
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
  for (int r = 0; r < C; r++) {
    const Histogram& h = *Team<C>::at(&shared.histogram, r);
    if constexpr (sizeof(sum) == sizeof(unsigned)) sum = sum + h.counts[bin];
    else sum = sum + Mass{(u64)h.mass1[bin] << 32 | h.mass0[bin], h.mass2[bin]};
  }
  return sum;
}
