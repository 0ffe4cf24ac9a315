// Rows none of which is longer than a block holds in its registers.
//
// An exact histogram of the scores' halves says which of them are in the set, but for the bin of the K-th; the few in
// that are ranked by comparing all pairs. A block does this once, so what counts is how many instructions there are on the
// way: rows that are anything else than longer than K and start at 0 take another.
#pragma once

#include "halves.cuh"

template <class T>
__device__ __noinline__ void select_short_any(const Request request, long long row, int start, int end) {
  begin();
  const Selector<T> selector(request, row, start, end, 1);
  if (is_trivial(request, selector.scores.length)) return selector.put_all();
  selector.apart().select_fitting();
}

// The best of a list of a few, which are many, to the places that are left.
template <class T>
__device__ __noinline__ void settle(Selector<T> selector, List list, int few, unsigned above) {
  const Request request = selector.request;
  const Selector<T> own(request, selector);
  __syncthreads();
  const u64 threshold = refine(list, few, request.k - above);
  own.put_unordered(list, few, above, [&](u64 rank) { return rank >= threshold; });
}

template <class T>
__device__ void select_short(const Request& request) {
  typedef Halves<T> Tile;
  constexpr int kWidth = Vector<T>::kWidth;
  __shared__ struct {
    unsigned low, high, above, count;
  } found;
  const long long row = blockIdx.x;
  const long long raw_end = request.end.raw(row, request.width);
  const T* data = static_cast<const T*>(request.scores) + row * request.pitch;
  // Rows that start at 0 need not wait for their ends.
  const Span<T> all(data, 0, request.width);
  Vector<T> v[kDepth];
  if (request.start.kind == kNone) {
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      const int j = threadIdx.x + d * kThreads;
      if (all.whole(j)) v[d] = all.load(j);
    }
  }
  clear(histogram());
  if (threadIdx.x == 0) state().kept = 0;
  __syncthreads();
  const int length = Bound::inside(raw_end, request.width);
  const unsigned k = request.k;
  // What is beyond a block's vectors is of a row that begins between two.
  const auto leave = [&] {
    const int start = Bound::inside(request.start.raw(row, 0), request.width);
    select_short_any<T>(request, row, start, length);
  };
  if (length <= k || request.start.kind != kNone || all.has(kDepth * kThreads)) return leave();

  const Span<T> span(data, 0, length);
  Tile tile;
#pragma unroll
  for (int d = 0; d < kDepth; d++) {
    const int j = threadIdx.x + d * kThreads;
    if (!span.whole(j) && span.has(j)) v[d] = Span<T>::clip(v[d], span, j, all.whole(j));
    if (span.has(j)) {
      tile.set(d, v[d]);
      tile.count(d);
    } else {
      tile.set_none(d);
    }
  }
  __syncthreads();
  const uint4 own = counts_from_top();
  const unsigned sum = own.x + own.y + own.z + own.w;
  unsigned before = sum_before(sum);
  const bool last = threadIdx.x == kThreads - 1;
  if (before < k && (k <= before + sum || last)) {
    const unsigned counts[4] = {own.x, own.y, own.z, own.w};
    // NaN, if all others are too few.
    unsigned place = kLastPlace, above = 0, count = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (before < k && k <= before + counts[i]) place = threadIdx.x * 4 + i, above = before, count = counts[i];
      before += counts[i];
    }
    const Limits limits(place);
    found.low = limits.low, found.high = limits.high;
    found.above = above, found.count = place == kLastPlace ? kBins * kSlack : count;
  }
  __syncthreads();
  const unsigned n = found.above, few = found.count;
  const bool ordered = request.order != kUnordered;
  if (n + few > request.capacity) return leave();

  const unsigned above = tile.hits(found.high);
  unsigned inside = tile.hits(found.low) & ~above;
  // Both at once, each in a half.
  const unsigned places = Selector<T>::places(__popc(above) | __popc(inside) << 16);
  const auto each = [&](auto f) {
    unsigned at = places & 0xffff;
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
#pragma unroll
      for (int w = 0; w < kWidth; w++) {
        if (above >> (d * Tile::kPairs + w / 2 + w % 2 * 16) & 1) {
          f(at, span.column + ((int)threadIdx.x + d * kThreads) * kWidth + w, v[d].at[w]);
          at++;
        }
      }
    }
  };
  const auto rank_at = [](int column, float x) { return rank_of(key_of_number(x), column); };
  if (ordered) each([&](unsigned at, int column, T x) { own_list()[at] = rank_at(column, widen(x)); });
  else each([](unsigned at, int column, T) { Selector<T>::staged()[at] = column; });
  u64* ranked = (few <= kRanked ? state().ranked : own_list().at() + n) + (places >> 16);
#pragma unroll 1
  while (inside) {
    const unsigned bit = __ffs(inside) - 1;
    inside &= inside - 1;
    const int d = Tile::vector_of(bit), w = Tile::element_of(bit);
    *ranked++ = rank_at(span.column + ((int)threadIdx.x + d * kThreads) * kWidth + w, pick(v, d * kWidth + w));
  }
  __syncthreads();
  const Selector<T> selector(request, row, 0, length, 1);
  if (request.routes && threadIdx.x == 0) {
    state().counters = RouteCounters{0, n + few, 0, (u64)length}, state().gathered = RouteCounters{0, 0, 0, 0};
    selector.put_route(kDirect);
  }
  if (threadIdx.x == 0) request.counts[row] = k;
  if (ordered) {
    if (few > kRanked) return selector.apart().finish_any(own_list(), n + few, k);
    selector.rank_few(state().ranked, few, n, kThreads, [](unsigned at, u64 rank) { own_list()[at] = rank; });
    __syncthreads();
    return selector.apart().put_sorted(own_list(), k);
  }
  const bool ranks = few <= kRanked;
  if (ranks) selector.put_staged_and_ranked(n, state().ranked, few);
  else selector.put_staged(request.positions, n);
  if (request.values) {
    // Of what was selected by its bin the scores are in L2 still.
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < n; i += kThreads) {
      request.values[row * k + i] = value_of(key_of_number(widen(data[(int)Selector<T>::staged()[i]])));
    }
  }
  if (!ranks) settle(selector.apart(), List{(int)n}, few, n);
}
