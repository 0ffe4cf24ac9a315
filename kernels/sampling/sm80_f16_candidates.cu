// One block a row.
#include "candidates.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    candidates(const Request request, unsigned* ids, float* log_probs,
               unsigned* counts, long long capacity) {
  candidates<__half, 1>(request, ids, log_probs, counts, capacity);
}
