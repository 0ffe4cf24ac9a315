// One large block a row, two to a multiprocessor, for batches whose rows all find room at once.
constexpr int kThreads = 512, kCandidates = 4096;
#include "candidates.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    candidates(const Request request, unsigned* ids, float* log_probs,
               unsigned* counts, long long capacity) {
  candidates<__nv_bfloat16, 1>(request, ids, log_probs, counts, capacity);
}
