// A cluster of blocks a row: its size is the launch's.
constexpr int kThreads = 512, kCandidates = 4096;
#include "mask.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    mask(const Request request, float* out, long long out_stride) {
  mask<float, 8>(request, out, out_stride);
}
