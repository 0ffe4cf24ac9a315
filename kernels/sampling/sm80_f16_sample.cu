// One small block a row, four to a multiprocessor: while one searches, others stream.
constexpr int kThreads = 256, kCandidates = 4096;
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    sample(const Request request, const __grid_constant__ DrawSource draws,
           const __grid_constant__ SampleOutputs out) {
  sample<__half, 1>(request, draws, out);
}
