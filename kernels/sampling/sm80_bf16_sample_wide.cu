// One large block a row, two to a multiprocessor, for batches whose rows all find room at once.
constexpr int kThreads = 512, kCandidates = 4096;
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sample(const Request request, const __grid_constant__ DrawSource draws,
           const __grid_constant__ SampleOutputs out) {
  sample<__nv_bfloat16, 1>(request, draws, out);
}
