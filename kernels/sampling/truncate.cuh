// Exact top-k, top-p and min-p of one row by one block, after Qrita (arXiv 2602.01518).
//
// A kept set is a prefix of the row in descending order, ties by position, so it is described by
// its cut: the key of its last element, and the positions up to which that key is kept. The cut is
// found in three parts, which follow the paper's sections 3.1 to 3.3:
//
//  1. Sigma-truncation. Mean and deviation of a block of sampled logits propose a threshold that
//     the kept set should lie above. One pass over the row finds the best element, counts what is
//     above -inf, and gathers what reaches the threshold into shared memory, the candidates.
//  2. Pivot search. Where the candidates hold the set (a hit), three pivots at a time split the
//     range of keys that the cut lies in. The range is one of integers, not of values, and after
//     each step it shrinks to the keys that exist in it, so it ends at one key after at most 16
//     steps, whatever the values. On a miss, a histogram of the row narrows the range by 2048 at a
//     time until what is in it fits into shared memory, and the search goes on there.
//  3. Duplicates. Of the elements that have the cut's key, those with the lowest positions are
//     kept. The same pivot search, over positions, finds the last of them.
//
// Fused: the first pass does the truncation, the maximum for the softmax, and the flags of special
// rows. Weights and sums of weights are integers (softmax.cuh): no order of arrival shows.
#pragma once

#include <cooperative_groups.h>

#include "../common/block.cuh"
#include "../common/order.cuh"
#include "../common/philox.cuh"
#include "../common/row.cuh"
#include "../common/softmax.cuh"

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
};

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

struct alignas(16) Shared {
  union {
    struct {
      unsigned keys[kCandidates], positions[kCandidates];
    };
    struct {
      // Sums of 96 bits, by words.
      unsigned counts[kBins], mass0[kBins], mass1[kBins], mass2[kBins];
    };
    Mass segments[kBins];
  };
};

// A measure of elements: their number or their mass. The search is the same for both.
struct Count {
  typedef unsigned Sum;
  static __device__ __forceinline__ unsigned zero() { return 0; }
};
struct Weight {
  typedef Mass Sum;
  static __device__ __forceinline__ Mass zero() { return {0, 0}; }
};

struct AddSums {
  template <class S>
  __device__ __forceinline__ S operator()(S a, S b) const { return a + b; }
};

// Where a search ended: the key at which the measure, taken in descending order, reaches the
// target, and the measure of all greater keys.
template <class M>
struct Found {
  unsigned key;
  typename M::Sum above;
};

// Quaternary search among `n` elements in shared memory for the key in [low, high] at which
// `above`, the measure beyond `high`, plus the measure of what is in the range reaches `target`.
// element(i, &key, &measure) gives an element, or false where it takes no part.
template <class M, class Element>
__device__ Found<M> pivot_search(int n, unsigned low, unsigned high, typename M::Sum above,
                                 typename M::Sum target, Element element) {
  typedef typename M::Sum Sum;
  struct Sums {
    Sum s[3];
  };
  struct Range {
    unsigned low, high;
  };
  while (true) {
    // Shrink the range to the keys that exist in it.
    Range range = {~0u, 0u};
    for (int i = threadIdx.x; i < n; i += kThreads) {
      unsigned key;
      Sum measure;
      if (element(i, &key, &measure) && key >= low && key <= high) {
        range.low = min(range.low, key), range.high = max(range.high, key);
      }
    }
    range = block_reduce(range, [](Range a, Range b) {
      return Range{min(a.low, b.low), max(a.high, b.high)};
    });
    low = range.low, high = range.high;
    if (low >= high) return {high, above};

    const unsigned width = high - low;
    const unsigned p1 = low + width / 4, p2 = low + width / 2, p3 = high - 1 - width / 4;
    // The measures of (p3, high], (p2, p3] and (p1, p2].
    Sums sums = {M::zero(), M::zero(), M::zero()};
    for (int i = threadIdx.x; i < n; i += kThreads) {
      unsigned key;
      Sum measure;
      if (element(i, &key, &measure) && key > p1 && key <= high) {
        if (key > p3) sums.s[0] = sums.s[0] + measure;
        else if (key > p2) sums.s[1] = sums.s[1] + measure;
        else sums.s[2] = sums.s[2] + measure;
      }
    }
    sums = block_reduce(sums, [](Sums a, Sums b) {
      return Sums{a.s[0] + b.s[0], a.s[1] + b.s[1], a.s[2] + b.s[2]};
    });
    const Sum above3 = above + sums.s[0], above2 = above3 + sums.s[1], above1 = above2 + sums.s[2];
    if (!(above3 < target)) low = p3 + 1;
    else if (!(above2 < target)) above = above3, high = p3, low = p2 + 1;
    else if (!(above1 < target)) above = above2, high = p2, low = p1 + 1;
    else above = above1, high = p1;
  }
}

// The truncation of one row. Every member is uniform over the block.
template <class T>
struct Kept {
  const Row<T> row;
  const Truncation limits;
  Shared& shared;
  Softmax softmax;

  unsigned best_key, best_position;
  unsigned numbers;  // how many logits are above -inf
  bool has_nan, has_infinity;

  // The cut: an element is kept where its key is greater, or equal at a position below `end`.
  unsigned cut_key, cut_end;

  // Shared memory holds the `gathered` elements whose keys lie in [low, high], all of them.
  unsigned low, high;
  int gathered;

  __device__ Kept(const Request& r, long long b, Shared& shared)
      : row(static_cast<const T*>(r.logits) + b * r.row_stride, r.vocab),
        limits(r, b),
        shared(shared),
        softmax(0.0f, 1.0f) {
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
    if (limits.top_p < 1.0f) top_p(r.joint, &ties);
    if (limits.min_p > 0.0f) min_p(&ties);
    if (ties) cut_end = position_of_tie(ties);
  }

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
    struct Both {
      Mass mass;
      unsigned count;
      unsigned pad;
    } both = {{0, 0}, 0, 0};
    auto take = [&](float x, int position) {
      if (holds(x, position)) both.mass = both.mass + Mass{softmax.mass(x), 0}, both.count++;
    };
    if (on_chip()) {
      for (int i = threadIdx.x; i < gathered; i += kThreads) {
        take(value_of(shared.keys[i]), shared.positions[i]);
      }
    } else {
      row.for_each(take);
    }
    both = block_reduce(both, [](Both a, Both b) {
      return Both{a.mass + b.mass, a.count + b.count, 0};
    });
    *count = both.count, *mass = both.mass;
  }

 private:
  // Part 1: the proposal and the pass over the row.
  __device__ void scan() {
    const float threshold = proposal();
    __shared__ int slots;
    if (threadIdx.x == 0) slots = 0;
    __syncthreads();

    float best = -CUDART_INF_F;
    int position = 0;
    unsigned above = 0, flags = 0;
    row.for_each([&](float x, int i) {
      if (x > best) best = x, position = i;
      above += x > -CUDART_INF_F;
      if (x != x && i >= 0 && i < row.size) flags |= 1;
      if (x >= threshold) push(&slots, key_of(x), i);
    });

    struct Summary {
      u64 rank;
      unsigned numbers, flags;
    } summary = {(u64)key_of(best) << 32 | ~(unsigned)position, above, flags};
    summary = block_reduce(summary, [](Summary a, Summary b) {
      return Summary{max(a.rank, b.rank), a.numbers + b.numbers, a.flags | b.flags};
    });
    best_key = summary.rank >> 32, best_position = ~(unsigned)summary.rank;
    numbers = summary.numbers;
    has_nan = summary.flags, has_infinity = value_of(best_key) == CUDART_INF_F;
    // The reduction was a barrier.
    gathered = slots;
    low = key_of(threshold), high = ~0u;
    if (gathered > kCandidates || threshold == CUDART_INF_F) forget();
  }

  __device__ __forceinline__ void push(int* slots, unsigned key, int position) {
    const auto group = cooperative_groups::coalesced_threads();
    int slot = 0;
    if (group.thread_rank() == 0) slot = atomicAdd(slots, (int)group.size());
    slot = group.shfl(slot, 0) + group.thread_rank();
    if (slot < kCandidates) shared.keys[slot] = key, shared.positions[slot] = position;
  }

  __device__ void forget() { gathered = 0, low = ~0u, high = 0; }

  // A threshold that the kept set should lie above, by a normal law with the mean and deviation of
  // a sample; +inf where nothing is to be gathered. It decides the route, never the result.
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
    struct Moments {
      float n, sum;
    } m = {0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kWidth; w++) {
      const float x = widen(v.at[w]);
      if (x > floor && x < CUDART_INF_F) m.n += 1.0f, m.sum += x;
    }
    m = block_reduce(m, [](Moments a, Moments b) { return Moments{a.n + b.n, a.sum + b.sum}; });
    const float mean = m.sum / m.n;
    float squares = 0.0f;
#pragma unroll
    for (int w = 0; w < kWidth; w++) {
      const float x = widen(v.at[w]);
      if (x > floor && x < CUDART_INF_F) squares += (x - mean) * (x - mean);
    }
    squares = block_reduce(squares, [](float a, float b) { return a + b; });
    const float sigma = sqrtf(squares / m.n);

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
    const float threshold = mean + delta * sigma;
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
        for (int i = threadIdx.x; i < gathered; i += kThreads) {
          const unsigned key = shared.keys[i];
          if (key >= from && key <= to) sum = sum + measure<M>(key);
        }
        hit = !(above + block_reduce(sum, AddSums()) < target);
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
    return pivot_search<M>(gathered, from, to, above, target,
                           [&](int i, unsigned* key, typename M::Sum* sum) {
                             *key = shared.keys[i];
                             *sum = measure<M>(*key);
                             return true;
                           });
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
    __shared__ int slots;
    while (true) {
      const int shift = max(0, 21 - __clz((to - from) | 1));  // 2048 bins at most
      __syncthreads();
      for (int i = threadIdx.x; i < kBins; i += kThreads) {
        shared.counts[i] = shared.mass0[i] = shared.mass1[i] = shared.mass2[i] = 0;
      }
      __syncthreads();
      row.for_each([&](float x, int) {
        const unsigned key = key_of(x);
        if (key >= from && key <= to) tally<M>((key - from) >> shift, key);
      });
      __syncthreads();
      // Thread t looks at the bins 2t and 2t + 1 from the top.
      const int upper = kBins - 1 - 2 * threadIdx.x, lower = upper - 1;
      const Sum own[2] = {tallied<M>(upper), tallied<M>(lower)};
      Sum total;
      Sum before = above + block_exclusive_sum(own[0] + own[1], M::zero(), AddSums(), &total);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const Sum after = before + own[i];
        if (before < target && !(after < target)) {
          choice = {before, (unsigned)(upper - i), shared.counts[upper - i]};
        }
        before = after;
      }
      if (threadIdx.x == 0) slots = 0;
      __syncthreads();
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
        row.for_each([&](float x, int i) {
          const unsigned key = key_of(x);
          if (key >= from && key <= to) push(&slots, key, i);
        });
        __syncthreads();
        gathered = slots, low = from, high = to;
        return search<M>(from, to, above, target);
      }
    }
  }

  template <class M>
  __device__ __forceinline__ void tally(unsigned bin, unsigned key);
  template <class M>
  __device__ __forceinline__ typename M::Sum tallied(int bin) const;

  // The mass of everything with a greater key.
  __device__ Mass mass_above(unsigned key) const {
    Mass sum = {0, 0};
    if (high == ~0u && gathered && key >= low) {
      for (int i = threadIdx.x; i < gathered; i += kThreads) {
        if (shared.keys[i] > key) sum = sum + measure<Weight>(shared.keys[i]);
      }
    } else {
      row.for_each([&](float x, int) {
        if (key_of(x) > key) sum = sum + Mass{softmax.mass(x), 0};
      });
    }
    return block_reduce(sum, AddSums());
  }

  // Cuts to the nucleus. Before, `ties` elements at the cut's key are kept, or it is exclusive.
  __device__ void top_p(int joint, unsigned* ties) {
    const bool limited = *ties > 0;
    const u64 each = limited ? softmax.mass(value_of(cut_key)) : 0;
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
    *ties = ties_for(target - found.above, softmax.mass(value_of(found.key)));
  }

  // The least count of elements of mass `each` that reaches `rest`; it exists below 2^32.
  static __device__ unsigned ties_for(Mass rest, u64 each) {
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
          gathered, 0u, ~0u, 0u, nth, [&](int i, unsigned* key, unsigned* count) {
            *key = ~shared.positions[i], *count = 1;
            return shared.keys[i] == cut_key;
          });
      return ~found.key + 1;
    }
    // Tile by tile in the order of positions.
    __shared__ unsigned end;
    unsigned before = 0;
    for (int base = 0; base < row.vectors(); base += kThreads) {
      const int j = base + threadIdx.x;
      unsigned count = 0;
      Vector<T> v;
      if (j < row.vectors()) {
        v = row.load(j);
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) count += key_of(widen(v.at[w])) == cut_key;
      }
      unsigned total;
      unsigned rank = before + block_exclusive_sum(count, 0u, AddSums(), &total);
      if (rank < nth && nth <= rank + count) {
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) {
          if (key_of(widen(v.at[w])) == cut_key && ++rank == nth) end = row.first(j) + w + 1;
        }
      }
      before += total;
      if (before >= nth) break;
    }
    __syncthreads();
    return end;
  }
};

template <class T>
template <class M>
__device__ __forceinline__ typename M::Sum Kept<T>::measure(unsigned key) const {
  if constexpr (sizeof(typename M::Sum) == sizeof(unsigned)) return 1u;
  else return Mass{softmax.mass(value_of(key)), 0};
}

template <class T>
template <class M>
__device__ __forceinline__ void Kept<T>::tally(unsigned bin, unsigned key) {
  atomicAdd(&shared.counts[bin], 1u);
  if constexpr (sizeof(typename M::Sum) != sizeof(unsigned)) {
    const u64 mass = softmax.mass(value_of(key));
    const unsigned low = (unsigned)mass;
    const unsigned carry = atomicAdd(&shared.mass0[bin], low) > ~low;
    // A mass is at most 2^62, so its upper word takes the carry.
    const unsigned high = (unsigned)(mass >> 32) + carry;
    if (high && atomicAdd(&shared.mass1[bin], high) > ~high) atomicAdd(&shared.mass2[bin], 1u);
  }
}

template <class T>
template <class M>
__device__ __forceinline__ typename M::Sum Kept<T>::tallied(int bin) const {
  if constexpr (sizeof(typename M::Sum) == sizeof(unsigned)) return shared.counts[bin];
  else return Mass{(u64)shared.mass1[bin] << 32 | shared.mass0[bin], shared.mass2[bin]};
}

// `name`_f32, `name`_f16 and `name`_bf16: one block a row.
#define FOR_EACH_DTYPE(M) M(f32, float) M(f16, __half) M(bf16, __nv_bfloat16)
