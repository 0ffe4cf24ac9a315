// One token a row: the CDF of the kept set, inverted in token-id order.
//
// Where the kept set is on chip, the pivot search that truncates also inverts: over ids, by mass.
// Otherwise the row is summed in segments of consecutive ids, and the segment that the draw falls
// into is scanned.
#include "truncate.cuh"

// Where the draws come from: `DrawSource` in src/sampling/cuda.rs.
struct DrawSource {
  // Seeds and steps, or bits, or neither: then `one` serves the only row.
  const long long* counters;
  long long counters_row, counters_column;
  const unsigned* bits;
  long long bits_row;
  u64 one;

  // As a fraction of 2^64.
  __device__ u64 draw(long long b) const {
    if (counters) {
      const long long* at = counters + b * counters_row;
      return philox_draw(at[0], at[counters_column]);
    }
    return bits ? (u64)bits[b * bits_row] << 32 : one;
  }
};

constexpr int kSegments = 256;
static_assert(kSegments <= kBins, "segments share the histogram's place");

template <class T>
__device__ unsigned invert_on_chip(const Kept<T>& kept, const Shared& shared, u64 draw) {
  unsigned size;
  Mass total;
  kept.count_and_mass(&size, &total);
  // The first id at which the cumulative mass exceeds the point.
  const Mass target = inverted(total, draw) + Mass{1, 0};
  const Found<Weight> found = pivot_search<Weight>(
      kept.gathered, 0u, ~0u, Mass{0, 0}, target, [&](int i, unsigned* key, Mass* mass) {
        const float x = value_of(shared.keys[i]);
        *key = ~shared.positions[i];
        if (!kept.holds(x, shared.positions[i])) return false;
        *mass = Mass{kept.softmax.mass(x), 0};
        return true;
      });
  return ~found.key;
}

template <class T>
__device__ unsigned invert_in_memory(const Kept<T>& kept, Shared& shared, u64 draw) {
  const Row<T>& row = kept.row;
  auto mass_of = [&](const Vector<T>& v, int first) {
    Mass mass = {0, 0};
#pragma unroll
    for (int w = 0; w < Row<T>::kWidth; w++) {
      const float x = widen(v.at[w]);
      if (kept.holds(x, first + w)) mass = mass + Mass{kept.softmax.mass(x), 0};
    }
    return mass;
  };
  const int length = (row.vectors() + kSegments - 1) / kSegments;
  const int lane = threadIdx.x % 32;
  for (int s = threadIdx.x / 32; s < kSegments; s += kWarps) {
    const int end = min((s + 1) * length, row.vectors());
    Mass mass = {0, 0};
    for (int j = s * length + lane; j < end; j += 32) mass = mass + mass_of(row.load(j), row.first(j));
    mass = warp_reduce(mass, AddSums());
    if (lane == 0) shared.segments[s] = mass;
  }
  __syncthreads();

  __shared__ struct {
    Mass rest;
    int segment;
    unsigned token;
  } at;
  if (threadIdx.x == 0) {
    Mass total = {0, 0};
    for (int s = 0; s < kSegments; s++) total = total + shared.segments[s];
    Mass point = inverted(total, draw);
    int s = 0;
    while (!(point < shared.segments[s])) point = point - shared.segments[s], s++;
    at.rest = point, at.segment = s;
  }
  __syncthreads();
  Mass point = at.rest;
  const int end = min((at.segment + 1) * length, row.vectors());
  for (int base = at.segment * length; base < end; base += kThreads) {
    const int j = base + threadIdx.x;
    Vector<T> v;
    Mass mass = {0, 0};
    if (j < end) v = row.load(j), mass = mass_of(v, row.first(j));
    Mass total;
    Mass before = block_exclusive_sum(mass, Mass{0, 0}, AddSums(), &total);
    if (!(point < before) && point < before + mass) {
      int token = -1;
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        const float x = widen(v.at[w]);
        if (token < 0 && kept.holds(x, row.first(j) + w)) {
          before = before + Mass{kept.softmax.mass(x), 0};
          if (point < before) token = row.first(j) + w;
        }
      }
      at.token = token;
    }
    if (point < total) break;
    point = point - total;
  }
  __syncthreads();
  return at.token;
}

// `notes` takes, where it isn't null, what the row held: 1 NaN, 2 +inf. A row that holds one of
// `refused` gives no token.
template <class T>
__device__ void sample(const Request& request, const DrawSource& draws, unsigned* tokens,
                       unsigned* notes, unsigned refused) {
  extern __shared__ Shared shared[];
  const long long b = blockIdx.x;
  const Kept<T> kept(request, b, *shared);
  const unsigned held = kept.has_nan | kept.has_infinity << 1;
  unsigned token = ~0u;
  if (kept.numbers > 0 && !(held & refused)) {
    if (kept.cut_key == kept.best_key && kept.cut_end == kept.best_position + 1) {
      token = kept.best_position;  // a set of one
    } else if (kept.on_chip()) {
      token = invert_on_chip(kept, *shared, draws.draw(b));
    } else {
      token = invert_in_memory(kept, *shared, draws.draw(b));
    }
  }
  if (threadIdx.x == 0) {
    tokens[b] = token;
    if (notes) notes[b] = held;
  }
}

#define KERNEL(name, T)                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                                      \
      sample_##name(const Request request, const DrawSource draws, unsigned* tokens,          \
                    unsigned* notes, unsigned refused) {                                      \
    sample<T>(request, draws, tokens, notes, refused);                                        \
  }
FOR_EACH_DTYPE(KERNEL)
