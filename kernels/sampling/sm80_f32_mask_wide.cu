// One large block a row, for batches that leave it a multiprocessor.
constexpr int kThreads = 1024, kCandidates = 4096;
#include "mask.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mask(const Request request, float* out, long long out_stride) {
  mask<float, 1>(request, out, out_stride);
}
