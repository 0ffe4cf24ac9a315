// One small block a row, four to a multiprocessor: while one searches, others stream.
constexpr int kThreads = 256, kCandidates = 4096;
#include "candidates.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    candidates(const Request request, unsigned* ids, float* log_probs,
               unsigned* counts, long long capacity) {
  candidates<__nv_bfloat16, 1>(request, ids, log_probs, counts, capacity);
}
