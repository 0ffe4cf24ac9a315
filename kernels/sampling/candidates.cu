// The kept set itself: ids in ascending order, log-probabilities, and its true size. The row is
// walked in tiles in the order of ids; a scan gives each survivor its place.
#include "truncate.cuh"

template <class T>
__device__ void candidates(const Request& request, unsigned* ids, float* log_probs,
                           unsigned* counts, long long capacity) {
  extern __shared__ Shared shared[];
  const long long b = blockIdx.x;
  const Kept<T> kept(request, b, *shared);
  const Row<T>& row = kept.row;
  ids += b * capacity, log_probs += b * capacity;

  unsigned size;
  Mass mass;
  kept.count_and_mass(&size, &mass);
  if (threadIdx.x == 0) counts[b] = size;
  for (long long i = size + threadIdx.x; i < capacity; i += kThreads) {
    ids[i] = ~0u, log_probs[i] = -CUDART_INF_F;
  }

  const unsigned wanted = size < capacity ? size : (unsigned)capacity;
  const double log_mass = log(raw_double(mass) / 4611686018427387904.0);
  unsigned before = 0;
  for (int base = 0; base < row.vectors() && before < wanted; base += kThreads) {
    const int j = base + threadIdx.x;
    Vector<T> v;
    unsigned count = 0;
    if (j < row.vectors()) {
      v = row.load(j);
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        count += kept.holds(widen(v.at[w]), row.first(j) + w);
      }
    }
    unsigned total;
    unsigned place = before + block_exclusive_sum(count, 0u, AddSums(), &total);
    if (count) {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        const float x = widen(v.at[w]);
        const int id = row.first(j) + w;
        if (kept.holds(x, id)) {
          if (place < wanted) ids[place] = id, log_probs[place] = kept.softmax.log_weight(x, log_mass);
          place++;
        }
      }
    }
    before += total;
  }
}

#define KERNEL(name, T)                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                                      \
      candidates_##name(const Request request, unsigned* ids, float* log_probs,               \
                        unsigned* counts, long long capacity) {                               \
    candidates<T>(request, ids, log_probs, counts, capacity);                                 \
  }
FOR_EACH_DTYPE(KERNEL)
