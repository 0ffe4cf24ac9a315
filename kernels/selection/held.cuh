// Rows that a block, alone on its multiprocessor, has in its shared memory as a whole.
//
// A row arrives by bulk copies, which take no registers and hardly an instruction. Meanwhile a sample says the cutoff
// (select.cuh, 1), and of each part that is there all scores are compared with it, by two instructions each: a bit says
// which reach it. When the last part is there these are numbered, and looked up on chip, each by a thread of its own (3). So
// nothing is read twice, and what is done for a candidate is done by all lanes of a warp, not by those that have one: what
// every warp does costs the time of all.
//
// All rows are read from their first part on. Rows that lie some power of two apart, and are read in step, were turned to
// begin with a part each, as other mappings do, and 128 of 32K took 21.0 us by that where they take 14.8.
#pragma once

#include "../common/cluster.cuh"
#include "short.cuh"

// Parts of a row: as many vectors of each thread as a tile has.
constexpr int kParts = 8;
constexpr int kPart = kDepth * kThreads;
// Scores of a row, as whole vectors of all threads, at most: `NUMBERED` in src/selection/plan.rs.
constexpr int kNumbered = 1 << 16;
static_assert(sizeof(State) + kParts * sizeof(Mail) + 1024 <= 8 << 10, "src/selection/plan.rs plans for as much");

template <class T>
struct HeldRow {
  static constexpr int kWidth = Vector<T>::kWidth;
  // Which of a thread's scores of a part reach the cutoff.
  typedef std::conditional_t<Hits<T>::kTiles == 2, unsigned short, unsigned> Word;
  static_assert(kNumbered / (kPart * kWidth) * kThreads * sizeof(Word) <= kBins * sizeof(unsigned), "in place of a histogram");
  static_assert(kNumbered <= kParts * kPart * kWidth, "a barrier for each");

  const Request& request;
  const Span<T> span;
  const int parts;
  Mail* const arrived;  // of each part

  // In the place of the order of the selected.
  __device__ __forceinline__ uint4* held() const { return reinterpret_cast<uint4*>(List{request.capacity}.at()); }
  // In the place of the sample's histogram.
  static __device__ __forceinline__ Word* words() { return reinterpret_cast<Word*>(histogram()) + threadIdx.x; }
  // In the place of the list.
  static __device__ __forceinline__ unsigned short* numbers() { return reinterpret_cast<unsigned short*>(own_list().at()); }

  // Sends for what is whole of a part of a span. By one thread.
  __device__ __forceinline__ void send(const Span<T>& of, int part) const {
    const int from = max(part * kPart, (int)(of.low > 0)), count = min((part + 1) * kPart, of.high / kWidth) - from;
    arrived[part].expect(max(count, 0) * sizeof(uint4));
    if (count > 0) arrived[part].fetch(held() + from, of.vectors + from, count * sizeof(uint4));
  }
  // The first part: the sample would come late behind more.
  __device__ __forceinline__ void send_first(const Span<T>& of) const {
    if (threadIdx.x == 0) send(of, 0);
  }
  // The others, as soon as some of the sample is there.
  __device__ __forceinline__ void send_others(const Span<T>& of, const Vector<T>& sampled) const {
    if (threadIdx.x > 0) return;
    unsigned word;
    memcpy(&word, &sampled, sizeof(word));
    forget_value(word);
#pragma unroll 1
    for (int part = 1; part < parts; part++) send(of, part);
  }
  // Until all that was sent for is there.
  __device__ __forceinline__ void await_all() const {
#pragma unroll 1
    for (int part = 0; part < parts; part++) arrived[part].wait(0);
    __syncthreads();
  }

  // A part of the row as this thread has it; NaN outside of the row.
  __device__ __forceinline__ void recall(int part, const Span<T>& loaded, Vector<T> (&v)[kDepth]) const {
    uint4* const at = held() + (part * kPart + (int)threadIdx.x);
    if ((part + 1) * kPart <= span.high / kWidth && (part > 0 || span.low == 0)) {
#pragma unroll
      for (int d = 0; d < kDepth; d++) memcpy(&v[d], at + d * kThreads, sizeof(uint4));
      return;
    }
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      const int j = part * kPart + d * kThreads + (int)threadIdx.x;
      const bool there = loaded.whole(j);
      v[d] = Span<T>::none();
      if (!span.has(j)) continue;
      if (there) memcpy(&v[d], at + d * kThreads, sizeof(uint4));
      if (span.whole(j)) continue;
      v[d] = Span<T>::clip(v[d], span, j, there);
      memcpy(at + d * kThreads, &v[d], sizeof(uint4));
    }
  }

  // Looks at each part as it arrives; how many of this thread's scores reach the cutoff, which is a number.
  __device__ __forceinline__ unsigned look(const Span<T>& loaded, float cut) const {
    const T below = below_of<T>(cut);
    unsigned mine = 0;
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
      arrived[part].wait(0);
      Vector<T> v[kDepth];
      recall(part, loaded, v);
      Hits<T> hits;
      hits.look_at(v, below);
      words()[part * kThreads] = (Word)hits.word;
      mine += __popc(hits.word);
    }
    return mine;
  }

  // Where the score of a bit is, from this thread's first one of a part on.
  static __device__ __forceinline__ int offset_of(int bit) {
    if constexpr (sizeof(T) == 4) {
      // Of bit 31 - i vector i / 4, element i % 4.
      constexpr int kApart = kThreads * kWidth;
      return 7 * kApart + 3 - (bit + bit / 4 * (kApart - 4));
    }
    const int i = Hits<T>::number_of(bit);
    return i / kWidth * kThreads * kWidth + i % kWidth;
  }
  // The numbers of those, from number `at` on.
  __device__ __forceinline__ void number(unsigned at) const {
    unsigned short* to = numbers() + at;
#pragma unroll 1
    for (int part = 0; part < parts; part += Hits<T>::kTiles) {
      unsigned word = words()[part * kThreads];
      if constexpr (Hits<T>::kTiles == 2) word = word << 16 | (part + 1 < parts ? words()[(part + 1) * kThreads] : 0);
#pragma unroll 1
      while (word) {
        // The highest: to find the lowest takes another slow instruction.
        const int bit = log_of(word);
        word ^= 1u << bit;
        *to++ = (part * kPart + (int)threadIdx.x) * kWidth + offset_of(bit);
      }
    }
  }

  __device__ __forceinline__ u64 rank_at(unsigned number) const {
    const float x = widen(reinterpret_cast<const T*>(held())[number]);
    return rank_of(key_of_number(x), span.column + (int)number);
  }

  // The best of so many more than K to the output.
  template <int kCandidates>
  __device__ __forceinline__ void finish(const Selector<T>& selector, int n, Leading leading) const {
    u64 mine[kCandidates];
#pragma unroll
    for (int e = 0; e < kCandidates; e++) {
      const int i = threadIdx.x + e * kThreads;
      mine[e] = i < n ? rank_at(numbers()[i]) : 0;
    }
    if (selector.put_leading(mine, leading)) return;
#pragma unroll
    for (int e = 0; e < kCandidates; e++) {
      const int i = threadIdx.x + e * kThreads;
      if (i < n) own_list()[i] = mine[e];
    }
    __syncthreads();
    selector.apart().finish_any(own_list(), n, selector.k());
  }
};

// The selection of a row that has no cutoff, or one that too many reach, or too few: from global memory.
template <class T>
__device__ __noinline__ void select_held_anew(Selector<T> selector, typename Selector<T>::Proposal proposal) {
  const Slice slice(0, 1, selector.scores.vectors);
  const bool cut = proposal.primary > kNegInfinityKey;
  selector.collect(slice, cut ? proposal.primary : 0, kAllKeys);
  int route = cut && selector.request.stride > 1 ? kPrimary : kDirect;
  if (state().count < selector.k()) route = selector.recover(slice, proposal);
  selector.finish(own_list(), state().count, route, proposal.leading);
}

template <class T>
__device__ void select_held(const Request& request) {
  __shared__ Mail arrived[kParts];
  const long long row = blockIdx.x;
  const T* data = static_cast<const T*>(request.scores) + row * request.pitch;
  const Span<T> full(data, 0, request.width);
  const int parts = (full.high + kPart * Span<T>::kWidth - 1) / (kPart * Span<T>::kWidth);
  // Where every row starts at 0, its scores need not wait for its end.
  const bool early = request.start.kind == kNone;
  Opening<T, false> opening(request, row, 0);
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int part = 0; part < parts; part++) arrived[part].open();
  }
  if (early) HeldRow<T>{request, full, parts, arrived}.send_first(full);
  begin();
  // Not sent for before the barrier: the compiler would wait for them there.
  const long long raw_start = request.start.raw(row, 0), raw_end = request.end.raw(row, request.width);
  const int start = Bound::inside(raw_start, request.width), end = Bound::inside(raw_end, request.width);
  const Selector<T> selector(request, row, start, end, 1);
  const Span<T> span(data, start, max(end - start, 0)), loaded = early ? full : span;
  const HeldRow<T> held = {request, span, parts, arrived};
  if (!early) held.send_first(span);
  const bool trivial = is_trivial(request, selector.scores.length);
  if (trivial || selector.fits()) {
    // What is on its way may land where this orders.
    held.send_others(loaded, Vector<T>());
    held.await_all();
    if (trivial) return selector.put_all();
    return selector.apart().select_fitting();
  }

  if (!opening.early) opening.load(selector, 0);
  held.send_others(loaded, opening.sampled[0]);
  const typename Selector<T>::Proposal proposal = selector.propose(opening.sampled);
  unsigned mine = 0;
  if (proposal.primary > kNegInfinityKey) mine = held.look(loaded, value_of(proposal.primary));
  else held.await_all();
  if (threadIdx.x == 0) state().kept = 0;
  __syncthreads();
  const unsigned first = Selector<T>::places(mine);
  __syncthreads();
  const unsigned n = state().kept;
  if (threadIdx.x == 0) state().counters.read += selector.scores.length;
  if (n <= request.k || n > request.capacity || request.stride == 1) {
    __syncthreads();
    return select_held_anew(selector.apart(), proposal);
  }
  held.number(first);
  __syncthreads();
  if (threadIdx.x == 0) state().counters.admitted = n;
  selector.put_route(kPrimary);
  // As many as K = 2048 has of a sample of one score in 16.
  constexpr int kFew = 6;
  if (n <= kFew * kThreads) held.template finish<kFew>(selector, n, proposal.leading);
  else held.template finish<2 * kEach>(selector, n, proposal.leading);
  selector.put_rest(request.k);
}
