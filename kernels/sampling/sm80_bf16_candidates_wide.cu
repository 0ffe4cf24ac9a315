// One large block a row, for batches that leave it a multiprocessor.
constexpr int kThreads = 1024, kCandidates = 4096;
#include "candidates.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    candidates(const Request request, unsigned* ids, float* log_probs,
               unsigned* counts, long long capacity) {
  candidates<__nv_bfloat16, 1>(request, ids, log_probs, counts, capacity);
}
