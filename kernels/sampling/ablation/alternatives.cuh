// The searches that runs of the ablation put in place of the kernels' own (../variant.cuh), for one block a
// row.
//
// Over the row in memory: a step is a pass that parts the range of keys by three pivots or one, measures
// the parts, and finds the keys that exist in them. As on chip, 32 elements are left to a warp.
//
// By sort: candidates by a bitonic sort on chip; a row by a radix sort in memory, of pairs of key and
// position, eight bits at a time from the least significant on. Then the order is walked.
#pragma once

#include "../truncate.cuh"

template <class M>
__device__ __forceinline__ typename M::Sum measure_of(const Softmax& softmax, float x) {
  if constexpr (sizeof(typename M::Sum) == sizeof(unsigned)) return 1u;
  else return Mass{softmax.mass(x), 0};
}

template <class M, class Key, class Measure>
__device__ __forceinline__ void Alternatives::halve(int n, unsigned* low, unsigned* high, typename M::Sum* above,
                                                    typename M::Sum target, Key key_at, Measure measure) {
  const unsigned middle = *low + (*high - *low) / 2;
  typename M::Sum upper = M::zero();
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kThreads) {
    unsigned key;
    if (key_at(i, &key) && key > middle && key <= *high) upper = upper + measure(i);
  }
  upper = *above + block_sum<M>(upper);
  if (!(upper < target)) *low = middle + 1;
  else *above = upper, *high = middle;
}

// What lies between pivots, from the greatest keys on: the last part is below all of them.
template <class M, int kPivots>
struct Parts {
  typename M::Sum sums[kPivots];
  unsigned counts[kPivots + 1], least[kPivots + 1], most[kPivots + 1];

  static __device__ __forceinline__ Parts none() {
    Parts parts;
#pragma unroll
    for (int p = 0; p <= kPivots; p++) {
      if (p < kPivots) parts.sums[p] = M::zero();
      parts.counts[p] = 0, parts.least[p] = ~0u, parts.most[p] = 0;
    }
    return parts;
  }
  __device__ __forceinline__ Parts operator+(const Parts& other) const {
    Parts parts;
#pragma unroll
    for (int p = 0; p <= kPivots; p++) {
      if (p < kPivots) parts.sums[p] = sums[p] + other.sums[p];
      parts.counts[p] = counts[p] + other.counts[p];
      parts.least[p] = min(least[p], other.least[p]), parts.most[p] = max(most[p], other.most[p]);
    }
    return parts;
  }
};

template <int kPivots>
struct Pivots {
  unsigned at[kPivots];  // descending; each is the greatest key of the part below it

  __device__ __forceinline__ Pivots(unsigned low, unsigned high) {
    const unsigned width = high - low;
    if constexpr (kPivots == 1) at[0] = low + width / 2;
    else at[0] = high - 1 - width / 4, at[1] = low + width / 2, at[2] = low + width / 4;
  }
};

// By itself, with nothing by reference, for the registers of the loop.
template <class M, int kPivots, class R>
__device__ __noinline__ Parts<M, kPivots> measure_parts(const R row, const Softmax softmax, unsigned low,
                                                        unsigned high, const Pivots<kPivots> pivots) {
  auto parts = Parts<M, kPivots>::none();
  row.for_each([&](float x, int) {
    const unsigned key = key_of(x);
    if (key < low || key > high) return;
    typename M::Sum its = M::zero();
    if (key > pivots.at[kPivots - 1]) its = measure_of<M>(softmax, x);
    bool above = true;  // all pivots before
#pragma unroll
    for (int p = 0; p <= kPivots; p++) {
      const bool inside = above && (p == kPivots || key > pivots.at[p < kPivots ? p : 0]);
      above = above && !inside;
      if (!inside) continue;
      if (p < kPivots) parts.sums[p] = parts.sums[p] + its;
      parts.counts[p]++, parts.least[p] = min(parts.least[p], key), parts.most[p] = max(parts.most[p], key);
    }
  });
  return parts;
}

template <class M, class K>
__device__ Found<M> Alternatives::search_row(K& kept, unsigned low, unsigned high, typename M::Sum above,
                                             typename M::Sum target) {
  typedef typename M::Sum Sum;
  constexpr int kPivots = kVariant.searches == Searches::kBinary ? 1 : 3;
  __shared__ unsigned slots;
  while (low < high) {
    count_step(), count_pass(kFallback);
    const Pivots<kPivots> pivots(low, high);
    const auto parts = block_reduce(measure_parts<M, kPivots>(kept.row, kept.softmax, low, high, pivots), AddSums());
    // The part in which the target is reached; it is reached in the last if in no other.
    unsigned left = 0;
    bool ends = false;
#pragma unroll
    for (int p = 0; p <= kPivots; p++) {
      if (ends) continue;
      const Sum next = p < kPivots ? above + parts.sums[p < kPivots ? p : 0] : target;
      ends = !(next < target);
      if (ends) left = parts.counts[p], low = parts.least[p], high = parts.most[p];
      else above = next;
    }
    if (left <= 32 && low < high) {
      if (threadIdx.x == 0) slots = 0;
      __syncthreads();
      count_pass();
      K::gather_slice(kept.row, low, high, &kept.shared.slice, &slots);
      kept.collect(&slots, low, high);
      return kept.template search<M>(low, high, above, target);
    }
  }
  kept.forget();
  __syncthreads();
  return {high, above};
}

// Where the measure of `n` elements in descending order, of those up to the key `high`, reaches the
// target.
template <class M, class Key>
__device__ __forceinline__ Found<M> walk(int n, unsigned high, typename M::Sum above, typename M::Sum target,
                                         const Softmax& softmax, Key key_at) {
  typedef typename M::Sum Sum;
  __shared__ unsigned end;
  Sum before = above;
  int walked = 0;
  __syncthreads();
#pragma unroll 1
  for (; walked < n && before < target; walked += kThreads) {
    const int i = walked + threadIdx.x;
    const unsigned key = i < n ? key_at(i) : 0;
    Sum own = M::zero(), total;
    if (i < n && key <= high) own = measure_of<M>(softmax, value_of(key));
    const Sum start = before + block_exclusive_sum(own, M::zero(), AddSums(), &total);
    if (start < target && !(start + own < target)) end = key;
    before = before + total;
  }
  __syncthreads();
  const unsigned found = end;
  Sum greater = M::zero();
#pragma unroll 1
  for (int i = threadIdx.x; i < min(walked, n); i += kThreads) {
    const unsigned key = key_at(i);
    if (key > found && key <= high) greater = greater + measure_of<M>(softmax, value_of(key));
  }
  return {found, above + block_sum<M>(greater)};
}

// In descending order of keys, ascending of positions. Nothing else gathered comes after the padding, the
// keys being those of numbers.
static __device__ __noinline__ void sort_elements(Elements* elements, int n) {
  int size = 2;
  while (size < n) size *= 2;
  for (int i = n + threadIdx.x; i < size; i += kThreads) elements->keys[i] = 0, elements->positions[i] = ~0u;
#pragma unroll 1
  for (int width = 2; width <= size; width *= 2) {
#pragma unroll 1
    for (int stride = width / 2; stride > 0; stride /= 2) {
      __syncthreads();
#pragma unroll 1
      for (int t = threadIdx.x; t < size / 2; t += kThreads) {
        const int i = 2 * t - (t & (stride - 1)), j = i + stride;
        const unsigned key = elements->keys[i], its_key = elements->keys[j];
        const unsigned position = elements->positions[i], its_position = elements->positions[j];
        const bool ordered = key > its_key || (key == its_key && position <= its_position);
        if (ordered != ((i & width) == 0)) {
          elements->keys[i] = its_key, elements->keys[j] = key;
          elements->positions[i] = its_position, elements->positions[j] = position;
        }
      }
    }
  }
  __syncthreads();
}

template <class M, class K>
__device__ Found<M> Alternatives::search_sorted(K& kept, unsigned high, typename M::Sum above,
                                                typename M::Sum target) {
  Elements* const elements = &kept.shared.gathered;
  // A top-p after a top-k finds them sorted.
  bool sorted = true;
  __syncthreads();
  for (int i = threadIdx.x; i + 1 < kept.gathered; i += kThreads) {
    const unsigned key = elements->keys[i], next = elements->keys[i + 1];
    sorted = sorted && (key > next || (key == next && elements->positions[i] < elements->positions[i + 1]));
  }
  if (__syncthreads_or(!sorted)) count_step(), sort_elements(elements, kept.gathered);
  return walk<M>(kept.gathered, high, above, target, kept.softmax, [elements](int i) { return elements->keys[i]; });
}

// Where rows are sorted: twice their elements, for each row. Lent by `lend` in the file of a run that sorts.
static __device__ u64* sort_scratch;

// Whether the row has been sorted: of its route's bits, one that nothing else has.
constexpr unsigned kSortedRow = 1u << 31;

// Pairs in the order of their keys, descending, from a row in `from`, or where that is null from its logits. Those of
// equal keys keep their order. `offsets` says where each digit's first goes.
template <class R>
static __device__ __noinline__ void scatter_by_digit(const R row, const u64* from, u64* to, int shift, unsigned* offsets,
                                                     unsigned (*counters)[256]) {
  constexpr int kItems = 8;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int base = 0; base < row.size; base += kThreads * kItems) {
    u64 items[kItems];
    unsigned ranks[kItems];
    const int first = base + warp * 32 * kItems + lane;
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const int at = first + i * 32;
      items[i] = 0;
      if (at < row.size) items[i] = from ? from[at] : (u64)key_of(widen(row.data[at])) << 32 | (unsigned)at;
    }
    for (int d = lane; d < 256; d += 32) counters[warp][d] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const unsigned digit = ~(unsigned)(items[i] >> 32) >> shift & 255;
      const bool exists = first + i * 32 < row.size;
      unsigned peers = __ballot_sync(~0u, exists);
#pragma unroll
      for (int b = 0; b < 8; b++) {
        const unsigned ones = __ballot_sync(~0u, digit >> b & 1);
        peers &= digit >> b & 1 ? ones : ~ones;
      }
      const unsigned before = __popc(peers & ((1u << lane) - 1));
      ranks[i] = counters[warp][digit] + before;
      __syncwarp();
      if (exists && before == 0) counters[warp][digit] += __popc(peers);
      __syncwarp();
    }
    __syncthreads();
    if (threadIdx.x < 256) {
      unsigned running = offsets[threadIdx.x];
#pragma unroll 4
      for (int w = 0; w < kWarps; w++) {
        const unsigned count = counters[w][threadIdx.x];
        counters[w][threadIdx.x] = running, running += count;
      }
      offsets[threadIdx.x] = running;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const unsigned digit = ~(unsigned)(items[i] >> 32) >> shift & 255;
      if (first + i * 32 < row.size) to[counters[warp][digit] + ranks[i]] = items[i];
    }
    __syncwarp();
  }
  __syncthreads();
}

template <class M, class K>
__device__ Found<M> Alternatives::search_sorted_row(K& kept, unsigned high, typename M::Sum above,
                                                    typename M::Sum target) {
  const int n = kept.row.size;
  u64* const sorted = sort_scratch + 2ll * n * kept.row_index();
  kept.forget();
  __syncthreads();
  const bool known = route_counters().route & kSortedRow;
  __syncthreads();
  if (!known) {
    count_pass(kFallback | kSortedRow);
    __shared__ unsigned offsets[4][256];
    static_assert(sizeof(unsigned[kWarps][256]) <= sizeof(Elements) && kThreads >= 256, "a warp's counters fit");
    for (int i = threadIdx.x; i < 4 * 256; i += kThreads) offsets[i / 256][i % 256] = 0;
    __syncthreads();
    kept.row.for_each([&](float x, int position) {
      if (position < 0 || position >= n) return;
      const unsigned key = ~key_of(x);
#pragma unroll
      for (int d = 0; d < 4; d++) shared_add(&offsets[d][key >> 8 * d & 255], 1);
    });
    __syncthreads();
#pragma unroll 1
    for (int d = 0; d < 4; d++) {
      unsigned total;
      const unsigned count = threadIdx.x < 256 ? offsets[d][threadIdx.x] : 0;
      const unsigned start = block_exclusive_sum(count, 0u, AddSums(), &total);
      if (threadIdx.x < 256) offsets[d][threadIdx.x] = start;
    }
    __syncthreads();
    auto* const counters = reinterpret_cast<unsigned(*)[256]>(kept.shared.gathered.keys);
#pragma unroll 1
    for (int d = 0; d < 4; d++) {
      count_step(), count_pass();
      u64* const from = d % 2 ? sorted + n : sorted;
      scatter_by_digit(kept.row, d == 0 ? nullptr : from, d % 2 ? sorted : sorted + n, 8 * d, offsets[d], counters);
    }
  }
  return walk<M>(n, high, above, target, kept.softmax, [sorted](int i) { return (unsigned)(sorted[i] >> 32); });
}
