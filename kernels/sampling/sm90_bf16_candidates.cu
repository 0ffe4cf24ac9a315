// A cluster of eight blocks a row.
#include "candidates.cuh"

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(kThreads, 1)
    candidates(const Request request, unsigned* ids, float* log_probs,
               unsigned* counts, long long capacity) {
  candidates<__nv_bfloat16, 8>(request, ids, log_probs, counts, capacity);
}
