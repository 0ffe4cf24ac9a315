// One large block a row, for batches that leave it a multiprocessor.
constexpr int kThreads = 1024, kCandidates = 4096;
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample(const Request request, const __grid_constant__ DrawSource draws,
           const __grid_constant__ SampleOutputs out) {
  sample<__nv_bfloat16, 1>(request, draws, out);
}
