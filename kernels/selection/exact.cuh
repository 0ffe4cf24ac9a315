// Rows that a block, or a cluster of blocks, has on chip: the paper's exact cluster. Neither a sample nor a cutoff that may
// fail.
//
//  1. Counting. Each member copies its slice to its shared memory, once, and counts the upper 11 bits of FP16's roundings
//     of it in a histogram.
//  2. Exchange. Each member makes of its histogram the counts from the top down, and sends every part of these to
//     the one that adds up this part. One finds in its part the bin of the K-th best, and tells each member which
//     bin that is and where in the output the member's selected go.
//  3. Output. What lies above the bin is selected as it stands. What lies in it is few: members send it each other,
//     with all its bits, and each ranks its own among all.
//
// So members meet thrice, by messages. In order of position they meet once more: a member has a bit for each of its
// scores, and tells how many it selects of every group of 32 vectors. In order of value what lies above the bin is sent to
// all as well. A row whose bin holds more than fits is narrowed further, with barriers of the cluster, to however few are
// wanted.
#pragma once

#include <cooperative_groups.h>

#include "../common/cluster.cuh"
#include "../common/pipeline.cuh"
#include "short.cuh"

// Members of a cluster, at most.
constexpr int kMembers = 16;
// Up to so many in the K-th's bin are told to all members, each of which ranks its own: a row of 128K has some 300.
constexpr int kTold = 512;
static_assert(kMembers == kWarps && kBins == kWarps * 128, "a warp has a part of the histogram, a member one or more");

// What a cluster's members have for each other.
struct Meeting {
  Mail counted, found, chosen, placed;
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
  static constexpr int kWidth = Vector<T>::kWidth, kPairs = kWidth / 2;
  // Vectors whose hits a thread has in one word.
  static constexpr int kRound = 16 / kPairs;
  // Vectors of a thread that are on their way.
  static constexpr int kWay = 8;

  const Request& request;
  const Span<T> span;
  const long long row;
  const int rank, blocks, step;
  // Vectors of a thread, and which of them is read first: rows that lie some power of two apart, and are read in step, would
  // all want the same of memory's channels.
  const int each, begins;

  __device__ __forceinline__ ExactSelector(const Request& request, const Span<T>& span, long long row, int rank, int blocks,
                                           int each)
      : request(request),
        span(span),
        row(row),
        rank(rank),
        blocks(blocks),
        step(kThreads * blocks),
        each(each),
        begins((int)row * 5 & ((1 << log_of(each)) - 1)) {}

  __device__ __forceinline__ unsigned k() const { return request.k; }

  // ---- The slice on chip, in the place of the order of the selected.

  // The i-th vector of a thread.
  __device__ __forceinline__ int vector(int thread, int i) const {
    const int turned = i + begins - (i + begins >= each ? each : 0);
    return (thread / 32 * blocks + rank) * 32 + thread % 32 + turned * step;
  }
  __device__ __forceinline__ uint4* held() const { return reinterpret_cast<uint4*>(List{request.capacity}.at()); }
  __device__ __forceinline__ Vector<T> recall(int i) const {
    Vector<T> v;
    memcpy(&v, held() + (i * kThreads + (int)threadIdx.x), sizeof(v));
    return v;
  }
  // A score's number says where it is held.
  __device__ __forceinline__ int column_of(unsigned number) const {
    const int at = number / kWidth;
    return span.column + vector(at % kThreads, at / kThreads) * kWidth + (int)(number % kWidth);
  }
  __device__ __forceinline__ u64 rank_at(unsigned number) const {
    return rank_of(key_of_number(widen(reinterpret_cast<const T*>(held())[number])), column_of(number));
  }

  // ---- Counting.

  // Vectors of a span; those that stick out are seen to later.
  __device__ __forceinline__ void send(const Span<T>& from, int i) const {
    const int j = vector(threadIdx.x, i);
    if (i < each && from.whole(j)) copy_16(held() + (i * kThreads + (int)threadIdx.x), from.vectors + j);
    copies_commit();
  }
  __device__ __forceinline__ void begin(const Span<T>& from) const {
#pragma unroll 1
    for (int i = 0; i < kWay; i++) send(from, i);
  }

  // Holds and counts all of the slice, of which what is whole of `loaded` is on its way.
  __device__ __forceinline__ void count(const Span<T>& loaded) const {
#pragma unroll 2
    for (int i = 0; i < each; i++) {
      copies_wait<kWay - 1>();
      Vector<T> v = recall(i);
      const int j = vector(threadIdx.x, i);
      if (!span.whole(j)) {
        if (span.has(j)) v = Span<T>::clip(v, span, j, loaded.whole(j));
        else v = Span<T>::none();
        memcpy(held() + (i * kThreads + (int)threadIdx.x), &v, sizeof(v));
      }
      send(loaded, i + kWay);
      if (span.has(j)) {
#pragma unroll
        for (int w = 0; w < kPairs; w++) {
          const unsigned word = halves_of(half_pair(v.at[2 * w], v.at[2 * w + 1]));
          count_in(histogram(), (word & 0xffff) >> 5);
          count_in(histogram(), word >> 21);
        }
      }
    }
  }

  // ---- The bin of the K-th best.

  // Of a block by itself.
  __device__ __forceinline__ Place find_alone(Meeting& meeting) const {
    const uint4 own = counts_from_top();
    const unsigned sum = own.x + own.y + own.z + own.w;
    unsigned before = sum_before(sum);
    const bool last = threadIdx.x == kThreads - 1;
    if (before < k() && (k() <= before + sum || last)) {
      const unsigned counts[4] = {own.x, own.y, own.z, own.w};
      // NaN, if all others are too few.
      uint4 verdict = {kLastPlace, before + sum, 0, 0};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (before < k() && k() <= before + counts[i]) verdict = make_uint4(threadIdx.x * 4 + i, before, counts[i], 0);
        before += counts[i];
      }
      meeting.verdict = verdict;
    }
    __syncthreads();
    const uint4 verdict = meeting.verdict;
    return {verdict.x, verdict.y, 0, verdict.z, 0, 0};
  }

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
        // Both at once: fewer than K lie above, and of the others it is enough that they are too many for any list.
        constexpr int kBits = 13;
        static_assert(kSlack < 1 << kBits && kMembers << 15 <= 1u << (32 - kBits), "in a word");
        const unsigned both = min(inside, 0x7fffu) << kBits | over, through = inclusive_sum(both);
        const unsigned all = __shfl_sync(~0u, through, 31), before = through - both;
        if (lane < blocks) {
          constexpr unsigned kOver = (1 << kBits) - 1;
          const unsigned place = reached ? part * 128 + bin : kLastPlace;
          const uint4 verdict = {place | rank << 16, (all & kOver) | (before & kOver) << 16, all >> kBits, before >> kBits};
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

  // The numbers of what lies above the bin to `staged`, and those of what lies in it to `insides` where these have room, or
  // else to f(number); how many of each there are. With a barrier at the end.
  struct Chosen {
    unsigned above, inside;
  };
  static __device__ __forceinline__ unsigned* insides() { return reinterpret_cast<unsigned*>(state().ranked); }
  template <class F>
  __device__ __forceinline__ Chosen choose(unsigned place, bool have_room, F f) const {
    static_assert(sizeof(state().ranked) >= kTold * sizeof(unsigned), "what is told");
    const Limits limits(place);
#pragma unroll 1
    for (int base = 0; base < each; base += kRound) {
      unsigned above = 0, inside = 0;
#pragma unroll
      for (int d = 0; d < kRound; d++) {
        if (base + d >= each) break;
        const Vector<T> v = recall(base + d);
#pragma unroll
        for (int w = 0; w < kPairs; w++) {
          const __half2 pair = as_pair(halves_of(half_pair(v.at[2 * w], v.at[2 * w + 1])));
          const unsigned bits = 0x00010001u << (d * kPairs + w);
          above |= __hge2_mask(pair, as_pair(limits.high)) & bits;
          inside |= __hge2_mask(pair, as_pair(limits.low)) & bits;
        }
      }
      inside &= ~above;
      const auto number = [&](unsigned bit) {
        const unsigned at = (base + bit % 16 / kPairs) * kThreads + threadIdx.x;
        return at * kWidth + bit % kPairs * 2 + bit / 16;
      };
      // Both at once, each in a half.
      const unsigned at = Selector<T>::places(__popc(above) | __popc(inside) << 16);
      unsigned at_above = at & 0xffff, at_inside = at >> 16;
#pragma unroll 1
      while (above) {
        Selector<T>::staged()[at_above++] = number(__ffs(above) - 1);
        above &= above - 1;
      }
#pragma unroll 1
      while (inside) {
        const unsigned which = number(__ffs(inside) - 1);
        inside &= inside - 1;
        if (have_room) insides()[at_inside++] = which;
        else f(which);
      }
    }
    __syncthreads();
    return {state().kept & 0xffff, state().kept >> 16};
  }

  // To number `to` of a list of a member.
  __device__ __forceinline__ void give(Meeting& meeting, u64* to, u64 rank, unsigned member) const {
    if (blocks == 1) *to = rank;
    else meeting.chosen.send(to, rank, member);
  }
  // f(where, which) for those of this member's in the bin that are selected: each is compared with all, two at a time, by
  // eight threads. Behind the last of all is a 0.
  template <class F>
  __device__ __forceinline__ void rank_own(const Place& place, unsigned own, F f) const {
    const ulonglong2* all = reinterpret_cast<const ulonglong2*>(own_list().at());
#pragma unroll 1
    for (unsigned base = threadIdx.x / 32 * 4; base < own; base += kThreads / 8) {
      const unsigned i = base + threadIdx.x % 32 / 8;
      const u64 mine = own_list()[place.first + min(i, own - 1)];
      unsigned better = 0;
#pragma unroll 4
      for (unsigned other = threadIdx.x % 8; other < (place.count + 1) / 2; other += 8) {
        const ulonglong2 two = all[other];
        better += (two.x > mine) + (two.y > mine);
      }
      better = warp_reduce<8>(better, [](unsigned a, unsigned b) { return a + b; }) + place.above;
      if (threadIdx.x % 8 == 0 && i < own && better < k()) f(better, mine);
    }
  }

  // Of n numbers to number `to` on of all members' lists.
  __device__ __forceinline__ void give_all(Meeting& meeting, u64* to, const unsigned* numbers, unsigned n) const {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < n * blocks; i += kThreads) {
      const unsigned at = i >> log_of(blocks);
      give(meeting, to + at, rank_at(numbers[at]), i & (blocks - 1));
    }
  }

  // The selected to the output. What lies in the bin all members tell each other, and each ranks its own among them;
  // but where it is many all that is to be ranked or ordered goes to the finder.
  __device__ __forceinline__ void finish(const Place& place, Meeting& meeting, const Selector<T>& selector) const {
    const bool ordered = request.order != kUnordered, by_value = request.order == kByValue;
    const bool finds = place.finder == rank;
    const bool told = place.count <= (blocks == 1 ? kRanked : kTold) &&
                      (!by_value || 2 * (place.count + place.above) <= request.capacity);
    const bool marks = told && ordered && !by_value;
    // Behind what lies in the bin.
    const unsigned listed = ordered && !marks ? place.above : 0;
    if (threadIdx.x == 0) {
      if (told || finds) meeting.chosen.expect((place.count + listed) * sizeof(u64));
      // Where nothing comes behind what is told.
      if (told && !listed) own_list()[place.count] = 0;
      if (finds) request.counts[row] = k();
      if (finds && request.routes) {
        state().counters = RouteCounters{0, place.above + place.count, 0, (u64)(span.high - span.low)};
        state().gathered = RouteCounters{0, 0, 0, 0};
        selector.put_route(kDirect);
      }
    }
    const Chosen chosen = choose(place.place, told, [&](unsigned number) {
      give(meeting, &own_list()[place.first + atomicAdd(&state().slots, 1)], rank_at(number), place.finder);
    });
    if (told) give_all(meeting, &own_list()[place.first], insides(), chosen.inside);
    if (marks) {
      mark_chosen(chosen.above);
    } else if (told && listed) {
      // Many: each thread has one for all members.
#pragma unroll 1
      for (unsigned i = threadIdx.x; i < chosen.above; i += kThreads) {
        const u64 rank = rank_at(Selector<T>::staged()[i]);
#pragma unroll 2
        for (int m = 0; m < blocks; m++) give(meeting, &own_list()[place.count + place.offset + i], rank, m);
      }
    } else {
#pragma unroll 1
      for (unsigned i = threadIdx.x; i < chosen.above; i += kThreads) {
        const u64 rank = rank_at(Selector<T>::staged()[i]);
        if (ordered) give(meeting, &own_list()[place.count + place.offset + i], rank, place.finder);
        else selector.put(place.offset + i, rank);
      }
    }
    if (!told && !finds) return;
    if (blocks == 1) __syncthreads();
    else meeting.chosen.wait(0);
    if (marks) return put_marked(place, meeting, selector, chosen);
    if (told && by_value) return put_by_value(place, selector, chosen);
    if (told) {
      return rank_own(place, chosen.inside, [&](unsigned at, u64 rank) { selector.put(at, rank); });
    }
    __syncthreads();
    if (ordered) return selector.apart().finish_any(own_list(), place.above + place.count, k());
    settle(selector.apart(), own_list(), place.count, place.above);
  }

  // ---- In order of position. A bit for each score of the slice, in the order of positions: behind what is told come these
  // marks, how many there are in each group of 32 vectors of each member, and where in the output a group's begin.

  __device__ __forceinline__ unsigned groups() const { return each * kWarps; }
  __device__ __forceinline__ u64* group_counts() const { return own_list().at() + kTold + 1; }
  __device__ __forceinline__ unsigned* begins_of_groups() const {
    return reinterpret_cast<unsigned*>(group_counts() + groups() / 4 * blocks);
  }
  __device__ __forceinline__ unsigned* marked() const { return begins_of_groups() + groups(); }
  __device__ __forceinline__ unsigned bit_of(int column) const {
    const int at = column - span.column, j = at / kWidth;
    return ((j / 32 >> log_of(blocks)) * 32 + j % 32) * kWidth + at % kWidth;
  }
  __device__ __forceinline__ void mark(int column) const {
    const unsigned bit = bit_of(column);
    atomicOr(&marked()[bit / 32], 1u << bit % 32);
  }
  // To where its mark says, if it has one.
  __device__ __forceinline__ void put_where_marked(const Selector<T>& selector, u64 rank) const {
    const unsigned bit = bit_of(position_in(rank)), word = bit / 32, group = word / kWidth;
    const unsigned bits = marked()[word];
    if (!(bits >> bit % 32 & 1)) return;
    unsigned at = begins_of_groups()[group] + __popc(bits & ((1u << bit % 32) - 1));
#pragma unroll
    for (unsigned w = 0; w < kWidth - 1; w++) at += w < word % kWidth ? __popc(marked()[group * kWidth + w]) : 0;
    selector.put(at, rank);
  }

  // What lies above the bin.
  __device__ __forceinline__ void mark_chosen(unsigned n) const {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < groups() * kWidth; i += kThreads) marked()[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < n; i += kThreads) mark(column_of(Selector<T>::staged()[i]));
  }

  __device__ __forceinline__ void put_marked(const Place& place, Meeting& meeting, const Selector<T>& selector,
                                             const Chosen& chosen) const {
    const unsigned words = groups() / 4;
    rank_own(place, chosen.inside, [&](unsigned, u64 rank) { mark(position_in(rank)); });
    __syncthreads();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < words * blocks; i += kThreads) {
      const unsigned at = i >> log_of(blocks);
      u64 four = 0;
#pragma unroll
      for (int g = 0; g < 4; g++) {
        unsigned count = 0;
#pragma unroll
        for (int w = 0; w < kWidth; w++) count += __popc(marked()[(at * 4 + g) * kWidth + w]);
        four |= (u64)count << 16 * g;
      }
      if (blocks == 1) group_counts()[at] = four;
      else meeting.placed.send(&group_counts()[rank * words + at], four, i & (blocks - 1));
    }
    if (blocks == 1) __syncthreads();
    else meeting.placed.wait(0);
    // A group of each member at once, and after them those that come next.
    const unsigned short* counts = reinterpret_cast<const unsigned short*>(group_counts());
    unsigned before = 0, total = 0;
    if (threadIdx.x < groups()) {
#pragma unroll 4
      for (int m = 0; m < blocks; m++) {
        const unsigned count = counts[m * groups() + threadIdx.x];
        before += m < rank ? count : 0, total += count;
      }
    }
    before += sum_before(total);
    if (threadIdx.x < groups()) begins_of_groups()[threadIdx.x] = before;
    __syncthreads();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < chosen.above + chosen.inside; i += kThreads) {
      const u64 rank =
          i < chosen.above ? rank_at(Selector<T>::staged()[i]) : own_list()[place.first + i - chosen.above];
      put_where_marked(selector, rank);
    }
  }

  // ---- In order of value.

  // All members have what lies in the bin and above, and order their own: by buckets of the values, and within each by
  // comparing all pairs.
  __device__ __forceinline__ void put_by_value(const Place& place, const Selector<T>& selector, const Chosen& chosen) const {
    const int n = place.count + place.above;
    const List all = own_list(), bucketed = {n};
    clear(buckets());
    // As many as a thread has of K = 2048 and a bin are read once.
    constexpr int kOwn = 6;
    u64 own[kOwn];
#pragma unroll
    for (int e = 0; e < kOwn; e++) {
      const int i = threadIdx.x + e * kThreads;
      own[e] = i < n ? all[i] : 0;
    }
    const auto for_each = [&](auto f) {
#pragma unroll
      for (int e = 0; e < kOwn; e++) {
        if ((int)threadIdx.x + e * kThreads < n) f(own[e]);
      }
#pragma unroll 1
      for (int i = threadIdx.x + kOwn * kThreads; i < n; i += kThreads) f(all[i]);
    };
    unsigned least = ~0u, most = 0;
    for_each([&](u64 rank) { least = min(least, key_in(rank)), most = max(most, key_in(rank)); });
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
    if (lane == 0) state().low[warp] = least, state().high[warp] = most;
    __syncthreads();
    least = __reduce_min_sync(~0u, state().low[lane % kWarps]), most = __reduce_max_sync(~0u, state().high[lane % kWarps]);
    // Of 2^32 a part as great as of the width a bucket. Approximate, and alike in all threads.
    const float part = __fdividef(kBins * 4294963200.0f, (float)(most - least) + 1.0f);
    const unsigned scale = (unsigned)fminf(part, 4294967040.0f);
    const auto bucket = [&](u64 rank) { return min(__umulhi(key_in(rank) - least, scale), kBins - 1u); };
    for_each([&](u64 rank) { count_in(buckets(), bucket(rank)); });
    __syncthreads();
    unsigned* ends = histogram();
    const FromTop counts(buckets());
    unsigned before = sum_before(counts.sum);
#pragma unroll
    for (int i = 0; i < FromTop::kOwn; i++) ends[counts.top - i] = before, before += counts.own[i];
    __syncthreads();
    for_each([&](u64 rank) { bucketed[shared_add(&ends[bucket(rank)], 1)] = rank; });
    __syncthreads();
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < chosen.above + chosen.inside; i += kThreads) {
      const u64 rank = all[i < chosen.above ? place.count + place.offset + i : place.first + i - chosen.above];
      const unsigned b = bucket(rank), end = ends[b];
      unsigned better = end - buckets()[b];
#pragma unroll 4
      for (unsigned other = better, stop = end; other < stop; other++) better += bucketed[other] > rank;
      if (better < k()) selector.put(better, rank);
    }
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
  const Span<T> full(data, 0, request.width);
  // Of vectors of the full width: a row has its own where these lie, or some of them.
  const int vectors = (full.high + Span<T>::kWidth - 1) / Span<T>::kWidth;
  const int each = (vectors + kThreads * blocks - 1) >> log_of(kThreads * blocks);
  if (early) ExactSelector<T>(request, full, row, rank, blocks, each).begin(full);
  if (threadIdx.x == 0) {
    meeting.counted.open(), meeting.found.open(), meeting.chosen.open(), meeting.placed.open();
    meeting.counted.expect(kCountedBytes);
    meeting.found.expect(sizeof(uint4));
    if (request.order == kByPosition) meeting.placed.expect(each * kWarps * blocks * sizeof(unsigned short));
    state().kept = 0, state().slots = 0, state().count = 0;
  }
  clear(histogram());
  __syncthreads();
  // Before its first word to another a member knows that all have begun.
  cluster_arrive_relaxed();
  const int start = Bound::inside(raw_start, request.width), end = Bound::inside(raw_end, request.width);
  if (end - start <= request.k) {
    // What is on its way may land where this orders.
    copies_wait<0>();
    __syncthreads();
    if (rank == 0) select_short_any<T>(request, row, start, end);
    return;
  }
  const Span<T> span(data, start, end - start);
  const ExactSelector<T> exact(request, span, row, rank, blocks, each);
  if (!early) exact.begin(span);
  exact.count(early ? full : span);
  __syncthreads();
  cooperative_groups::this_cluster().barrier_wait();
  const Place place = blocks == 1 ? exact.find_alone(meeting) : exact.find(meeting);
  const Selector<T> selector(request, row, start, end, 1);
  if (place.place == kLastPlace || place.above + place.count > request.capacity) {
    return narrow<T>(selector.apart(), rank, blocks, place);
  }
  exact.finish(place, meeting, selector);
}
