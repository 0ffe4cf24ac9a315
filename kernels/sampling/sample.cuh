// One token a row: the CDF of the kept set, inverted in token-id order.
//
// A small set is ranked by its ids. Where a larger one is on chip, the pivot search that truncates
// also inverts: over ids, by mass.
// Otherwise, and where nothing limits the set, the row is summed in segments of consecutive ids by exact sums in f64
// (softmax.cuh), and the segment that the draw falls into is scanned.
#pragma once

#include "truncate.cuh"

// Where the draws come from: `DrawSource` in src/sampling/cuda.rs.
struct DrawSource {
  // Seeds and steps, or bits, or neither: then `one` serves the only row.
  const long long* counters;
  long long counters_row, counters_column;
  const unsigned* bits;
  long long bits_row;
  u64 one;

  // What a row's draw is made from: loaded early, and waited for where it is needed.
  struct Drawn {
    bool counted;
    long long seed, step;

    // As a fraction of 2^64.
    __device__ __forceinline__ u64 draw() const { return counted ? philox_draw(seed, step) : (u64)seed; }
  };
  __device__ __forceinline__ Drawn load(long long b) const {
    if (counters) {
      const long long* at = counters + b * counters_row;
      return {true, at[0], at[counters_column]};
    }
    return {false, bits ? (long long)((u64)bits[b * bits_row] << 32) : (long long)one, 0};
  }
};

// What a launch writes, a value a row: `SampleOutputs` in src/sampling/cuda.rs. All but the tokens
// may be null.
struct SampleOutputs {
  unsigned* tokens;
  // What the row held: 1 NaN, 2 +inf.
  unsigned* notes;
  // Over the kept set, in the bits of `candidates`; -inf without a token.
  float* log_probs;
  // The counters that the draws are made from: each row's step grows by one.
  long long* advance;
  // A row that holds one of these gives no token.
  unsigned refused;
};

// Where a draw falls among the first `size` of the ranked, by exact sums in the order of ids: the element. By one warp.
static __device__ __noinline__ unsigned invert_exactly(const Top& top, unsigned size, u64 draw) {
  Mass mass = {0, 0};
#pragma unroll 1
  for (unsigned i = 0; i < size; i++) mass = mass + Mass{top.mass(top.by_rank[i]), 0};
  const Mass point = inverted(mass, draw);
  unsigned drawn = 0;
#pragma unroll 1
  for (unsigned i = threadIdx.x % 32; i < size; i += 32) {
    const unsigned mine = top.by_rank[i], id = (unsigned)top.orders[mine];
    Mass up_to = {0, 0};
#pragma unroll 1
    for (unsigned j = 0; j < size; j++) {
      const unsigned other = top.by_rank[j];
      if ((unsigned)top.orders[other] >= id) up_to = up_to + Mass{top.mass(other), 0};
    }
    if (point < up_to && !(point < up_to - Mass{top.mass(mine), 0})) drawn = mine;
  }
  return __reduce_max_sync(~0u, drawn);
}

// The same by rounded sums, in the order of ids; ~0 where they leave a doubt. `ranked` are in that order.
template <class N>
__device__ __forceinline__ unsigned invert_about(const Top& top, unsigned ranked, unsigned size, u64 draw) {
  // A few each. What is not kept has no weight.
  const unsigned first = threadIdx.x % 32 * kTopEach;
  const ushort4 four = reinterpret_cast<const ushort4*>(top.by_id)[threadIdx.x % 32];
  const unsigned entries[kTopEach] = {four.x, four.y, four.z, four.w};
  N weights[kTopEach], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kTopEach; i++) {
    const bool is = first + i < ranked && entries[i] >> 8 < size;
    weights[i] = is ? Rounding<N>::round(top.weights[entries[i] & 0xff]) : N(0), sum += weights[i];
  }
  N up_to = exclusive_sum(sum, &total);
  const N point = total * ((N)draw * N(0x1p-64)), margin = total * Rounding<N>::kMost;
  unsigned drawn = 0;
#pragma unroll
  for (int i = 0; i < kTopEach; i++) {
    const N before = up_to;
    up_to += weights[i];
    if (weights[i] > 0 && point + margin < up_to && point - margin >= before) drawn = entries[i] | ~0xffu;
  }
  drawn = __reduce_max_sync(~0u, drawn);
  return drawn ? drawn & 0xff : ~0u;
}
static __device__ __noinline__ unsigned invert_better(const Top& top, unsigned ranked, unsigned size, u64 draw) {
  const unsigned drawn = invert_about<double>(top, ranked, size, draw);
  return drawn != ~0u ? drawn : invert_exactly(top, size, draw);
}

// All inversions tell the mass of the kept set too, or its logarithm; this one, by the first warp, the token's logit and
// its exponent.
template <class T, int C>
__device__ __forceinline__ unsigned invert_top(const Kept<T, C>& kept, u64 draw, bool wants_log, double* log,
                                               float* logit, float* exponent) {
  const Top& top = kept.shared.top;
  u64 order = 0;
  if (threadIdx.x < 32) {
    unsigned drawn = invert_about<float>(top, kept.ranked, kept.members, draw);
    if (drawn == ~0u) drawn = invert_better(top, kept.ranked, kept.members, draw);
    order = top.orders[drawn];
    *logit = value_of(order >> 32), *exponent = kept.softmax.exponent(*logit);
    forget_value(*exponent);  // Not after the logarithm.
  }
  if (wants_log) {
    __shared__ double logarithm;
    if (threadIdx.x / 32 == kWarps - 1) {
      const double its = log_mass(kept.mass_of_members());
      if (threadIdx.x % 32 == 0) logarithm = its;
    }
    __syncthreads();
    *log = logarithm;
  }
  return ~(unsigned)order;
}

template <class T, int C>
__device__ unsigned invert_on_chip(const Kept<T, C>& kept, u64 draw, Mass* mass) {
  unsigned size;
  Mass total;
  kept.count_and_mass(&size, &total);
  *mass = total;
  // The first id at which the cumulative mass exceeds the point.
  const Mass target = inverted(total, draw) + Mass{1, 0};
  const Elements* const elements = &kept.shared.gathered;
  const Softmax softmax = kept.softmax;
  const unsigned cut_key = kept.cut_key, cut_end = kept.cut_end;
  const Found<Weight> found = pivot_search<Weight>(
      kept.gathered, 0u, ~0u, Mass{0, 0}, target,
      [elements, cut_key, cut_end](int i, unsigned* key) {
        *key = ~elements->positions[i];
        return elements->keys[i] > cut_key || (elements->keys[i] == cut_key && elements->positions[i] < cut_end);
      },
      [elements, softmax](int i) { return Mass{mass_of_few(softmax, value_of(elements->keys[i])), 0}; });
  return ~found.key;
}

// The masses of what is kept of each segment's whole vectors: of so many tiles of a warp's loads. Of what equals a bound,
// of mass `each`, those below a position are kept; or, where the cut is still open, what lies between two bounds is noted.
// A warp has a tile of loads in flight while it looks at the one before, beyond the ends of segments. No call: what lives
// through one has few registers.
template <int C>
constexpr int kTileDepth = C == 1 ? 2 : 1;
template <class T, int C, Exponents kExponents>
static __device__ __noinline__ void sum_segments(const typename Kept<T, C>::TeamRow row, const Softmax softmax, int tiles,
                                                 float low, float high, bool open, unsigned end_of_equal, u64 each) {
  // By what is known without a register.
  auto& shared = *reinterpret_cast<Shared<C>*>(dynamic);
  constexpr int kDepth = kTileDepth<C>, kTile = kDepth * 32;
  const Weights<kExponents> weights(softmax);
  const int lane = threadIdx.x % 32, length = tiles * kTile;
  int from, to;
  row.whole_vectors(&from, &to);
  int segment = threadIdx.x / 32, left = tiles, j = row.begin + segment * length + lane;
  typename Weights<kExponents>::Sum sum;
  unsigned equal = 0;
  Vector<T> v[kDepth];
#pragma unroll
  for (int d = 0; d < kDepth; d++) v[d] = row.load_whole(j + d * 32, j + d * 32 >= from && j + d * 32 < to);
#pragma unroll 1
  while (j - lane < to) {
    const bool ends = left == 1 || j - lane + kTile >= to;
    const int ahead = ends ? row.begin + (segment + kWarps) * length + lane : j + kTile;
    Vector<T> next[kDepth];
#pragma unroll
    for (int d = 0; d < kDepth; d++) next[d] = row.load_whole(ahead + d * 32, ahead + d * 32 < to);
    loads_go_first();
    bool any = false;
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        const float x = widen(v[d].at[w]);
        sum.add(weights.of(x, x > high));
        any |= x >= low && !(x > high);
      }
    }
    if (any) {
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) {
          const float x = widen(v[d].at[w]);
          if (!(x >= low) || x > high) continue;
          const unsigned position = row.first(j + d * 32) + w;
          if (open) {
            const unsigned slot = shared_add(&Kept<T, C>::left_open().slots, 1);
            if (slot < kCandidates) shared.slice.keys[slot] = key_of(x), shared.slice.positions[slot] = position;
          } else {
            equal += position < end_of_equal;
          }
        }
      }
    }
    if (ends) {
      const Mass mass = warp_sum(sum.mass() + times(each, equal));
      if (lane == 0) shared.segments[segment] = mass;
      sum = {}, equal = 0, segment += kWarps, left = tiles;
    } else {
      left--;
    }
#pragma unroll
    for (int d = 0; d < kDepth; d++) v[d] = next[d];
    j = ahead;
  }
#pragma unroll 1
  for (; segment < kSegments; segment += kWarps) {
    if (lane == 0) shared.segments[segment] = {0, 0};
  }
}

// ~0 from the members whose slices the draw does not fall into. Where the cut is still open, the pass that sums the
// segments settles it.
struct Inverted {
  unsigned token;
  Mass mass;
};
template <class T, int C>
__device__ __noinline__ Inverted invert_in_memory(const Kept<T, C>* of_row, u64 draw) {
  Kept<T, C> kept(*of_row);
  const auto& row = kept.row;
  Mass(&segments)[kSegments] = kept.shared.segments;
  auto mass_of = [&](const Vector<T>& v, int first) {
    Mass mass = {0, 0};
#pragma unroll
    for (int w = 0; w < Row<T>::kWidth; w++) {
      const float x = widen(v.at[w]);
      if (kept.holds(x, first + w)) mass = mass + Mass{kept.softmax.mass(x), 0};
    }
    return mass;
  };
  constexpr int kTile = kTileDepth<C> * 32;
  const int tiles = max((row.end - row.begin + kTile * kSegments - 1) / (kTile * kSegments), 1), length = tiles * kTile;
  const bool open = kept.open;
  const unsigned end_of_equal = kept.cut_end;
  const float high = open ? kept.left_open().high : greatest_up_to(kept.cut_key);
  // Where nothing that equals it is kept, nothing is to be looked for.
  const float low = open ? kept.left_open().low : end_of_equal > 0 ? high : CUDART_NAN_F;
  const u64 each = !open && end_of_equal > 0 ? mass_of_few(kept.softmax, low) : 0;
  __syncthreads();
  by_exponents(kept.softmax, length, [&](auto way) {
    sum_segments<T, C, way.kWay>(row, kept.softmax, tiles, low, high, open, end_of_equal, each);
  });
  int edge;
  if (open && row.has_edge(&edge)) {
    Kept<T, C>::note_open(row.load(edge), row.first(edge), low, high, &kept.shared.slice, &kept.left_open().slots);
  }
  __syncthreads();
  Mass mine = {0, 0};
  const int begin = min(row.begin + (int)min((int)threadIdx.x, kSegments) * length, row.end), end = min(begin + length, row.end);
  if (threadIdx.x < kSegments) {
    mine = segments[threadIdx.x];
    const auto add_edge = [&](int j) {
      const int first = row.first(j);
#pragma unroll 1
      for (int i = max(first, 0); i < min(first + Row<T>::kWidth, row.size); i++) {
        const float x = widen(row.data[i]);
        if (x > high || (x >= low && !open && (unsigned)i < end_of_equal)) mine = mine + Mass{mass_of_few(kept.softmax, x), 0};
      }
    };
    if (begin < end && row.first(begin) < 0) add_edge(begin);
    if (begin < end && row.first(end) > row.size && (end - 1 > begin || row.first(begin) >= 0)) add_edge(end - 1);
  }
  if (open) {
    kept.settle(mine);
    const int from = row.first(begin), to = row.first(end);
#pragma unroll 1
    for (int i = 0; threadIdx.x < kSegments && i < kept.gathered; i++) {
      const int position = (int)kept.shared.gathered.positions[i];
      const float x = value_of(kept.shared.gathered.keys[i]);
      if (position >= from && position < to && kept.holds(x, position)) {
        mine = mine + Mass{mass_of_few(kept.softmax, x), 0};
      }
    }
  }
  // One segment a thread; the sum over those before it is exact in any order.
  Mass own, total;
  const Mass start = block_exclusive_sum(mine, Mass{0, 0}, AddSums(), &own);
  Mass before = {0, 0};
  total = own;
  if constexpr (C > 1) {
    // The first that the members say here: none reads an earlier word.
    __shared__ Mass said;
    if (threadIdx.x == 0) said = own;
    Team<C>::sync();
    const unsigned lane = threadIdx.x % 32;
    const Mass its = lane < Team<C>::size() ? *Team<C>::at(&said, lane) : Mass{0, 0};
    total = warp_sum(its), before = warp_sum(lane < Team<C>::rank() ? its : Mass{0, 0});
  }
  Mass point = inverted(total, draw);
  if (point < before || !(point < before + own)) return {~0u, total};
  point = point - before;

  __shared__ struct {
    Mass rest;
    int segment;
    unsigned token;
  } at;
  if (!(point < start) && point < start + mine) at.rest = point - start, at.segment = threadIdx.x;
  __syncthreads();
  point = at.rest;
  const int first = row.begin + at.segment * length, last = min(first + length, row.end);
#pragma unroll 1
  for (int base = first; base < last; base += kThreads) {
    const int j = base + threadIdx.x;
    Vector<T> v;
    Mass mass = {0, 0};
    if (j < last) v = row.load(j), mass = mass_of(v, row.first(j));
    Mass sum;
    Mass before = block_exclusive_sum(mass, Mass{0, 0}, AddSums(), &sum);
    if (!(point < before) && point < before + mass) {
      int token = -1;
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        const float x = widen(v.at[w]);
        if (token < 0 && kept.holds(x, row.first(j) + w)) {
          before = before + Mass{mass_of_few(kept.softmax, x), 0};
          if (point < before) token = row.first(j) + w;
        }
      }
      at.token = token;
    }
    if (point < sum) break;
    point = point - sum;
  }
  __syncthreads();
  return {at.token, total};
}

// What a launch writes of a row, by one thread. A logit that is not known is looked up.
template <class T, int C>
__device__ __forceinline__ void say(const Kept<T, C>& kept, const SampleOutputs& out, unsigned token, float logit,
                                    float exponent, double log, Mass mass) {
  const long long b = kept.row_index();
  out.tokens[b] = token;
  if (out.notes) out.notes[b] = kept.has_nan | kept.has_infinity << 1;
  if (out.log_probs) {
    float log_prob = -CUDART_INF_F;
    if (token != ~0u) {
      if (logit != logit) {
        logit = widen(kept.row.data[token]), exponent = kept.softmax.exponent(logit), log = log_mass(mass);
      }
      log_prob = kept.softmax.log_weight(logit, exponent, log);
    }
    out.log_probs[b] = log_prob;
  }
}

template <class T, int C>
__device__ __forceinline__ bool gives_token(const Kept<T, C>& kept, const SampleOutputs& out) {
  return kept.numbers > 0 && !((kept.has_nan | kept.has_infinity << 1) & out.refused);
}

// All rows whose set is not among the best of the first pass. By itself: it takes no registers from the others.
template <class T, int C>
__device__ __noinline__ void sample_rest(const Kept<T, C>* of_row, float own_best, float own_sum, int joint,
                                         unsigned* routes, const DrawSource& draws, const SampleOutputs& out) {
  Kept<T, C> kept(*of_row, *reinterpret_cast<Shared<C>*>(dynamic));
  kept.finish(joint, routes, own_best, own_sum);
  const long long b = kept.row_index();
  bool says = Team<C>::rank() == 0;
  unsigned token = ~0u;
  float logit = CUDART_NAN_F, exponent = 0.0f;
  Mass mass = {0, 0};
  double log = 0.0;
  const DrawSource::Drawn drawn = draws.load(b);
  if (gives_token(kept, out)) {
    if (kept.cut_key == kept.best_key && kept.cut_end == kept.best_position + 1) {
      token = kept.best_position, logit = value_of(kept.best_key);
    } else if (kept.members) {
      if (says) token = invert_top(kept, drawn.draw(), out.log_probs, &log, &logit, &exponent);
    } else if (kept.on_chip()) {
      token = invert_on_chip(kept, drawn.draw(), &mass);
    } else {
      const Inverted its = invert_in_memory(kept.published(), drawn.draw());
      token = its.token, mass = its.mass;
      says = token != ~0u;
    }
  }
  says = says && threadIdx.x == 0;
  if (says) say(kept, out, token, logit, exponent, log, mass);
  // Not before every member that reads the step has.
  Team<C>::sync();
  if (says && out.advance) {
    out.advance[b * draws.counters_row + draws.counters_column] = (long long)((u64)drawn.step + 1);
  }
}

template <class T, int C>
__device__ __forceinline__ void sample(const Request& request, const DrawSource& draws, const SampleOutputs& out) {
  // Its loads, too, go out at the beginning; of one warp, lest all wait for them at once, and of the
  // member that speaks for a small set.
  __shared__ u64 draw;
  __shared__ long long step;
  DrawSource::Drawn drawn = {false, 0, 0};
  unsigned index = Team<C>::index();
  forget_value(index);  // A division: not once more where it is needed again.
  const bool draws_early = threadIdx.x / 32 == kWarps - 1 && Team<C>::rank() == 0;
  if (draws_early) drawn = draws.load(index);
  const Kept<T, C> kept(request, *reinterpret_cast<Shared<C>*>(dynamic), index, true, [&] {
    if (draws_early) {
      const u64 its = drawn.draw();
      if (threadIdx.x % 32 == 0) draw = its, step = drawn.step;
    }
  });
  if (!kept.members) {
    sample_rest(kept.published(), kept.own_best, kept.own_sum, request.joint, request.routes, draws, out);
    return;
  }
  const bool says = Team<C>::rank() == 0;
  unsigned token = ~0u;
  float logit = CUDART_NAN_F, exponent = 0.0f;
  double log = 0.0;  // of a set of one
  if (gives_token(kept, out)) {
    if (kept.cut_key == kept.best_key && kept.cut_end == kept.best_position + 1) {
      token = kept.best_position, logit = value_of(kept.best_key);
    } else if (says) {
      token = invert_top(kept, draw, out.log_probs, &log, &logit, &exponent);
    }
  }
  if (says && threadIdx.x == 0) say(kept, out, token, logit, exponent, log, Mass{0, 0});
  kept.leave();
  // The member that speaks is the one that has read the step.
  if (says && threadIdx.x == 0 && out.advance) {
    out.advance[kept.row_index() * draws.counters_row + draws.counters_column] = (long long)((u64)step + 1);
  }
}
