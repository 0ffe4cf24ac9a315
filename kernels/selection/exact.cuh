// Rows that a cluster of blocks has on chip: the paper's exact cluster. Neither a sample nor a cutoff that may fail.
//
//  1. Counting. Each member reads its slice once. Of every score it keeps FP16's rounding, in shared memory, and
//     counts its upper 11 bits in a histogram.
//  2. Exchange. Each member makes of its histogram the counts from the top down, and sends every part of these to
//     the one that adds up this part. One finds in its part the bin of the K-th best, and tells each member which
//     bin that is and where in the output the member's selected go.
//  3. Output. What lies above the bin is selected as it stands. What lies in it is few: members send it each other,
//     with all its bits, and each ranks its own among all.
//
// So members meet thrice, by messages. A row whose bin holds more than fits is narrowed further, with barriers of
// the cluster, to however few are wanted.
#pragma once

#include <cooperative_groups.h>

#include "../common/cluster.cuh"
#include "short.cuh"

// Members of a cluster, at most.
constexpr int kMembers = 16;
// Up to so many in the K-th's bin are told to all members, each of which ranks its own: a row of 128K has some 300.
constexpr int kTold = 512;
static_assert(kMembers == kWarps && kBins == kWarps * 128, "a warp has a part of the histogram, a member one or more");

// What a cluster's members have for each other.
struct Meeting {
  Mail counted, found, chosen;
  uint4 verdict;
  unsigned tops[kMembers];   // of each part and member: what lies above the part
  u64 parts[kMembers * 32];  // counts from the top down to each bin, four to a word
};
static_assert(sizeof(State) + sizeof(Meeting) + 1024 <= 8 << 10, "src/selection/plan.rs plans for as much");
constexpr unsigned kCountedBytes = kMembers * (32 * sizeof(u64) + sizeof(unsigned));

// Where the K-th best lies.
struct Place {
  unsigned place;          // of its bin
  unsigned above, offset;  // how many lie above it: of the row, and of members before this one
  unsigned count, first;   // and in it
  unsigned finder;
};

template <class T>
struct ExactSelector {
  typedef Halves<T> Tile;
  static constexpr int kWidth = Vector<T>::kWidth;
  // Tiles whose hits a thread has in one word.
  static constexpr int kRound = 16 / Tile::kWords;

  const Request& request;
  const Span<T> span;
  const long long row;
  const int rank, blocks, first, step;

  __device__ __forceinline__ ExactSelector(const Request& request, const Span<T>& span, long long row, int rank, int blocks)
      : request(request),
        span(span),
        row(row),
        rank(rank),
        blocks(blocks),
        first(((int)threadIdx.x / 32 * blocks + rank) * 32 + (int)threadIdx.x % 32),
        step(kThreads * blocks) {}

  __device__ __forceinline__ unsigned k() const { return request.k; }

  // ---- Halves. Vector d of tile t of a thread lies kPairs words from those of its neighbours.

  static constexpr int kNext = kThreads * Tile::kPairs;
  __device__ __forceinline__ unsigned* kept(int tile) const {
    return reinterpret_cast<unsigned*>(List{request.capacity}.at()) + tile * (kDepth * kNext) +
           threadIdx.x * Tile::kPairs;
  }
  // Of this block's warps, the first has the most.
  __device__ __forceinline__ int tiles() const {
    const int vectors = (span.high + kWidth - 1) / kWidth - rank * 32;
    return max(vectors + kDepth * step - 1, 0) / (kDepth * step);
  }
  static __device__ __forceinline__ Tile recall(const unsigned* from) {
    Tile tile;
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      if constexpr (Tile::kPairs == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(from + d * kNext);
        tile.words[2 * d] = v.x, tile.words[2 * d + 1] = v.y;
      } else {
        const uint4 v = *reinterpret_cast<const uint4*>(from + d * kNext);
        tile.words[4 * d] = v.x, tile.words[4 * d + 1] = v.y, tile.words[4 * d + 2] = v.z, tile.words[4 * d + 3] = v.w;
      }
    }
    return tile;
  }
  static __device__ __forceinline__ void keep(unsigned* to, const Tile& tile) {
    const unsigned(&words)[Tile::kWords] = tile.words;
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      if constexpr (Tile::kPairs == 2) {
        *reinterpret_cast<uint2*>(to + d * kNext) = make_uint2(words[2 * d], words[2 * d + 1]);
      } else {
        *reinterpret_cast<uint4*>(to + d * kNext) =
            make_uint4(words[4 * d], words[4 * d + 1], words[4 * d + 2], words[4 * d + 3]);
      }
    }
  }

  // ---- Counting.

  // Vectors j and so on of a span; those that stick out are seen to later.
  __device__ __forceinline__ void load(const Span<T>& from, int j, Vector<T> (&v)[kDepth]) const {
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      if (from.whole(j + d * step)) v[d] = from.load(j + d * step);
    }
  }

  // Keeps and counts all of the slice, of which what is whole of the first tile in `loaded` is there.
  __device__ __forceinline__ void count(const Span<T>& loaded, Vector<T> (&v)[kDepth]) const {
    const int total = tiles();
    int j = first;
#pragma unroll 1
    for (int t = 0; t < total; t++) {
      Tile tile;
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        const int at = j + d * step;
        if (!span.whole(at) && span.has(at)) {
          v[d] = Span<T>::clip(v[d], span, at, t == 0 && loaded.whole(at));
        }
        if (span.has(at)) tile.set(d, v[d]);
        else tile.set_none(d);
      }
      if (t + 1 < total) load(span, j + kDepth * step, v);
      keep(kept(t), tile);
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        if (span.has(j + d * step)) tile.count(d);
      }
      j += kDepth * step;
    }
  }

  // ---- The bin of the K-th best.

  __device__ __forceinline__ Place find(Meeting& meeting) const {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint4 own = counts_from_top();
    unsigned down = sum_before(own.x + own.y + own.z + own.w);
    // Part `warp` to the member with this rank: its so many.
    const unsigned member = warp & (blocks - 1), line = (warp & ~(blocks - 1)) + rank;
    if (lane == 0) meeting.counted.send(&meeting.tops[line], down, member);
    // Beyond all K that there are it does not matter how many.
    const auto next = [&](unsigned count) { return min(down += count, 0xffffu); };
    unsigned low = next(own.x);
    low |= next(own.y) << 16;
    unsigned high = next(own.z);
    high |= next(own.w) << 16;
    meeting.counted.send(&meeting.parts[line * 32 + lane], (u64)high << 32 | low, member);

    if (warp < kMembers / blocks) {
      meeting.counted.wait(0);
      const unsigned from = warp * blocks, part = from + rank;
      unsigned sums[4] = {0, 0, 0, 0};
#pragma unroll 4
      for (unsigned m = 0; m < blocks; m++) {
        const u64 four = meeting.parts[(from + m) * 32 + lane];
        sums[0] += (unsigned)four & 0xffff, sums[1] += (unsigned)four >> 16;
        sums[2] += (unsigned)(four >> 32) & 0xffff, sums[3] += (unsigned)(four >> 48);
      }
      const unsigned top = lane < blocks ? meeting.tops[from + lane] : 0;
      const unsigned reached = __ballot_sync(~0u, sums[3] >= k());
      // One part has it. The last one knows that none has: then it is NaN.
      if (reached ? __reduce_add_sync(~0u, top) < k() : part == kMembers - 1) {
        const int in = reached ? __ffs(reached) - 1 : 31;
        const unsigned short_of = (sums[0] < k()) + (sums[1] < k()) + (sums[2] < k());
        const unsigned bin = in * 4 + __shfl_sync(~0u, short_of, in);
        unsigned over = 0, inside = 0;
        if (lane < blocks) {
          const unsigned short* counts = reinterpret_cast<const unsigned short*>(meeting.parts + (from + lane) * 32);
          over = bin ? counts[bin - 1] : top, inside = counts[bin] - over;
        }
        const unsigned overs = inclusive_sum(over), insides = inclusive_sum(inside);
        const unsigned all_over = __shfl_sync(~0u, overs, 31), all_inside = __shfl_sync(~0u, insides, 31);
        if (lane < blocks) {
          const unsigned place = reached ? part * 128 + bin : kLastPlace;
          const uint4 verdict = {place | rank << 16, all_over | (overs - over) << 16, all_inside, insides - inside};
          meeting.found.send(&meeting.verdict, verdict, lane);
        }
      }
      __syncwarp();
    }
    meeting.found.wait(0);
    const volatile uint4& verdict = meeting.verdict;
    const unsigned x = verdict.x, y = verdict.y;
    return {x & 0xffff, y & 0xffff, y >> 16, verdict.z, verdict.w, x >> 16};
  }

  // ---- Output.

  __device__ __forceinline__ u64 rank_at(unsigned column) const {
    const T* data = static_cast<const T*>(request.scores) + row * request.pitch;
    return rank_of(key_of_number(widen(data[column])), column);
  }

  // What lies above the bin to `staged`; f(rank) for what lies in it. With a barrier at the end.
  template <class F>
  __device__ __forceinline__ void choose(unsigned place, F f) const {
    const Limits limits(place);
    const int total = tiles();
#pragma unroll 1
    for (int t = 0; t < total; t += kRound) {
      Tile tile = recall(kept(t));
      unsigned above = tile.hits(limits.high), inside = tile.hits(limits.low);
      if (kRound > 1 && t + 1 < total) {
        tile = recall(kept(t + 1));
        above |= tile.hits(limits.high) << Tile::kWords % 16, inside |= tile.hits(limits.low) << Tile::kWords % 16;
      }
      const auto column_of = [&](unsigned bit) {
        const int vector = first + (int)(Tile::vector_of(bit) + t * kDepth) * step;
        return span.column + vector * kWidth + (int)Tile::element_of(bit);
      };
      inside &= ~above;
      // Its score is far: others are dealt with until it is there.
      const T* data = static_cast<const T*>(request.scores) + row * request.pitch;
      const int column = column_of(__ffs(inside) - 1);
      T score;
      if (inside) score = data[column];
      unsigned at = Selector<T>::places(__popc(above));
#pragma unroll 1
      while (above) {
        Selector<T>::staged()[at++] = column_of(__ffs(above) - 1);
        above &= above - 1;
      }
      if (inside) f(rank_of(key_of_number(widen(score)), column));
      inside &= inside - 1;
#pragma unroll 1
      while (inside) {
        f(rank_at(column_of(__ffs(inside) - 1)));
        inside &= inside - 1;
      }
    }
    __syncthreads();
  }

  // The selected to the output. What lies in the bin all members tell each other, and each ranks its own among them;
  // but where it is many, or the row is to be in order, all that is selected goes to the finder.
  __device__ __forceinline__ void finish(const Place& place, Meeting& meeting, const Selector<T>& selector) const {
    const bool ordered = request.order != kUnordered, finds = place.finder == rank;
    const bool few = place.count <= kRanked, told = !ordered && place.count <= kTold;
    const unsigned listed = ordered ? place.above : 0;
    u64* inside = few ? state().ranked : own_list().at() + listed;
    if (threadIdx.x == 0) {
      if (told || finds) meeting.chosen.expect((listed + place.count) * sizeof(u64));
      if (finds) request.counts[row] = k();
      if (finds && request.routes) {
        state().counters = RouteCounters{0, place.above + place.count, 0, (u64)(span.high - span.low)};
        state().gathered = RouteCounters{0, 0, 0, 0};
        selector.put_route(kDirect);
      }
    }
    choose(place.place, [&](u64 rank) {
      u64* to = &inside[place.first + atomicAdd(&state().slots, 1)];
#pragma unroll 1
      for (unsigned m = told ? 0 : place.finder; m < (told ? (unsigned)blocks : place.finder + 1); m++) {
        meeting.chosen.send(to, rank, m);
      }
    });
    const unsigned mine = state().kept;
    const bool bits = request.order == kByValue || request.values;
    unsigned* positions = request.positions + row * k() + place.offset;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < mine; i += kThreads) {
      const unsigned column = Selector<T>::staged()[i];
      const u64 rank = bits ? rank_at(column) : rank_of(~0u, column);
      if (ordered) {
        meeting.chosen.send(&own_list()[place.offset + i], rank, place.finder);
      } else {
        positions[i] = column;
        if (request.values) request.values[row * k() + place.offset + i] = value_of(key_in(rank));
      }
    }
    if (!told && !finds) return;
    meeting.chosen.wait(0);
    if (told) {
      return selector.rank_few(inside, place.count, place.first, state().slots, place.above,
                               [&](unsigned at, u64 rank) { selector.put(at, rank); });
    }
    if (few) {
      selector.rank_few(inside, place.count, 0, place.count, place.above,
                        [](unsigned at, u64 rank) { own_list()[at] = rank; });
      __syncthreads();
      return selector.apart().put_sorted(own_list(), k());
    }
    __syncthreads();
    if (ordered) return selector.apart().finish_any(own_list(), place.above + place.count, k());
    settle(selector.apart(), own_list(), place.count, place.above);
  }
};

template <class T>
struct Narrowing {
  static constexpr int kWidth = Vector<T>::kWidth;
  const Selector<T>& selector;
  const Slice slice;

  __device__ __forceinline__ unsigned k() const { return selector.k(); }

  // ---- Rows whose bin holds more than fits.

  static __device__ __forceinline__ void sync() {
    cooperative_groups::this_cluster().sync();
  }

  // f(score, column, whether there is one) for all of the slice, by whole warps.
  template <class F>
  __device__ __forceinline__ void for_each(F f) const {
    constexpr int kTogether = 2;
    const int lane = threadIdx.x % 32, n = slice.end;
#pragma unroll 1
    for (int j = slice.first; j - lane < n; j += kTogether * slice.step) {
      Vector<T> v[kTogether];
#pragma unroll
      for (int d = 0; d < kTogether; d++) v[d] = selector.scores.load(min(j + d * slice.step, n - 1));
#pragma unroll
      for (int d = 0; d < kTogether; d++) {
        const int at = j + d * slice.step;
#pragma unroll
        for (int w = 0; w < kWidth; w++) f(widen(v[d].at[w]), selector.scores.column(at) + w, at < n);
      }
    }
    if (slice.has_ends()) {
      float x = 0;
      int column = -1;
      selector.ends(slice, [&](float score, int at) { x = score, column = at; });
      f(x, column, column >= 0);
    }
  }

  // The least and the greatest key of the bin, of all members.
  __device__ __forceinline__ Keys bin_range(unsigned place) const {
    unsigned least = ~0u, most = 0;
    for_each([&](float x, int, bool mine) {
      if (mine && place_of(bin_of_score(x)) == place) least = min(least, key_of(x)), most = max(most, key_of(x));
    });
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
    if (lane == 0) state().low[warp] = least, state().high[warp] = most;
    __syncthreads();
    if (warp == 0) {
      least = __reduce_min_sync(~0u, lane < kWarps ? state().low[lane] : ~0u);
      most = __reduce_max_sync(~0u, lane < kWarps ? state().high[lane] : 0);
      if (lane == 0) state().found[0] = Found{least, most, 0};
    }
    sync();
    least = ~0u, most = 0;
    if (lane < slice.blocks) {
      const Found of_member = *cooperative_groups::this_cluster().map_shared_rank(&state().found[0], lane);
      least = of_member.bin, most = of_member.above;
    }
    return {__reduce_min_sync(~0u, least), __reduce_max_sync(~0u, most)};
  }

  // Halves the bin's ranks, in their order, until few enough are left; then all goes to the first one's list.
  __device__ __forceinline__ void narrow(Place place) const {
    const Keys keys = bin_range(place.place);
    u64 low = (u64)keys.least << 32, high = (u64)keys.most << 32 | ~0u;
    unsigned above = place.above, passes = 2;
    while (true) {
      if (low >> 32 == high >> 32 && (unsigned)low == 0 && (unsigned)high == ~0u) {
        // Ties: what is left differs in its positions alone.
        low |= (unsigned)~(selector.scores.start + selector.scores.length - 1);
        high = (high ^ ~0u) | (unsigned)~selector.scores.start;
      }
      const u64 width = high - low;
      // Whole keys, or positions of one.
      const int shift = width >> 32 ? max(bin_shift(width), 32) : bin_shift(width);
      sync();
      clear(histogram());
      __syncthreads();
      for_each([&](float x, int column, bool mine) {
        const u64 over = rank_of(key_of(x), column) - low;
        // Of many in one bin these are added up first.
        if (mine && over <= width && place_of(bin_of_score(x)) == place.place) {
          atomicAdd(&histogram()[over >> shift], 1);
        }
      });
      sync();
#pragma unroll 1
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
        unsigned sum = 0;
#pragma unroll 1
        for (int member = 0; member < slice.blocks; member++) {
          sum += cooperative_groups::this_cluster().map_shared_rank(histogram(), member)[bin];
        }
        buckets()[bin] = sum;
      }
      __syncthreads();
      passes++;
      find_bins(1, k() - above, 0);
      const Found found = state().found[0];
      above += found.above;
      low += (u64)found.bin << shift;
      high = min(high, low + ((1ull << shift) - 1));
      if (above + found.count <= selector.capacity()) break;
    }
    u64* list = cooperative_groups::this_cluster().map_shared_rank(own_list().at(), 0);
    unsigned* count = cooperative_groups::this_cluster().map_shared_rank(&state().count, 0);
    const int lane = threadIdx.x % 32;
    for_each([&](float x, int column, bool mine) {
      const unsigned own = place_of(bin_of_score(x));
      const u64 rank = rank_of(key_of(x), column);
      const bool take = mine && (own < place.place || (own == place.place && rank >= low));
      const unsigned vote = __ballot_sync(~0u, take);
      if (!vote) return;
      unsigned at = 0;
      if (lane == 0) at = atomicAdd(count, __popc(vote));
      at = __shfl_sync(~0u, at, 0) + __popc(vote & ((1u << lane) - 1));
      if (take) list[at] = rank;
    });
    sync();
    if (slice.rank > 0) return;
    if (threadIdx.x == 0) {
      const u64 read = (u64)(passes + 1) * selector.scores.length;
      state().counters = RouteCounters{0, state().count, 0, read}, state().gathered = RouteCounters{0, 0, 0, 0};
    }
    __syncthreads();
    selector.put_route(kDirect);
    selector.apart().finish_any(own_list(), state().count, k());
    selector.put_rest(k());
  }
};

template <class T>
__device__ __noinline__ void narrow(Selector<T> selector, unsigned rank, unsigned blocks, Place place) {
  const Narrowing<T> narrowing = {selector, Slice(rank, blocks, selector.scores.vectors)};
  narrowing.narrow(place);
}

template <class T>
__device__ __forceinline__ void select_exact(const Request& request) {
  __shared__ Meeting meeting;
  const int blocks = request.blocks, rank = blockIdx.x & (blocks - 1);
  const long long row = blockIdx.x >> log_of(blocks);
  const long long raw_start = request.start.raw(row, 0), raw_end = request.end.raw(row, request.width);
  const T* data = static_cast<const T*>(request.scores) + row * request.pitch;
  // Where every row starts at 0, its scores need not wait for its end.
  const bool early = request.start.kind == kNone;
  Vector<T> v[kDepth];
  Span<T> loaded(data, 0, early ? request.width : 0);
  if (early) {
    const ExactSelector<T> whole(request, loaded, row, rank, blocks);
    whole.load(loaded, whole.first, v);
    // What follows is sent for, to L2. Eight threads have a line.
    if (threadIdx.x % 8 == 0) {
#pragma unroll 4
      for (int j = whole.first + kDepth * whole.step; loaded.has(j); j += whole.step) {
        prefetch_to_l2(loaded.vectors + j);
      }
    }
  }
  if (threadIdx.x == 0) {
    meeting.counted.open(), meeting.found.open(), meeting.chosen.open();
    meeting.counted.expect(kCountedBytes);
    meeting.found.expect(sizeof(uint4));
    state().kept = 0, state().slots = 0, state().count = 0;
  }
  clear(histogram());
  __syncthreads();
  // Before its first word to another a member knows that all have begun.
  cluster_arrive_relaxed();
  const int start = Bound::inside(raw_start, request.width), end = Bound::inside(raw_end, request.width);
  if (end - start <= request.k) {
    if (rank == 0) select_short_any<T>(request, row, start, end);
    return;
  }
  const Span<T> span(data, start, end - start);
  const ExactSelector<T> exact(request, span, row, rank, blocks);
  if (!early) {
    loaded = span;
    exact.load(loaded, exact.first, v);
  }
  exact.count(loaded, v);
  __syncthreads();
  cooperative_groups::this_cluster().barrier_wait();
  const Place place = exact.find(meeting);
  const Selector<T> selector(request, row, start, end, 1);
  const unsigned listed = request.order != kUnordered ? place.above : 0;
  if (place.place == kLastPlace || listed + place.count > request.capacity) {
    return narrow<T>(selector.apart(), rank, blocks, place);
  }
  exact.finish(place, meeting, selector);
}
