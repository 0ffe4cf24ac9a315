// A cluster of blocks a row: its size is the launch's.
constexpr int kThreads = 512, kCandidates = 2048;
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample(const Request request, const __grid_constant__ DrawSource draws,
           const __grid_constant__ SampleOutputs out) {
  sample<__nv_bfloat16, 8>(request, draws, out);
}
