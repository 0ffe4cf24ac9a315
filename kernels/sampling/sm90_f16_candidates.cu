// A cluster of blocks a row: its size is the launch's.
constexpr int kThreads = 512, kCandidates = 2048;
#include "candidates.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    candidates(const Request request, unsigned* ids, float* log_probs,
               unsigned* counts, long long capacity) {
  candidates<__half, 8>(request, ids, log_probs, counts, capacity);
}
