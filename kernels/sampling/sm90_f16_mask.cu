// A cluster of blocks a row: its size is the launch's.
constexpr int kThreads = 512, kCandidates = 2048;
#include "mask.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mask(const Request request, __half* out, long long out_stride) {
  mask<__half, 8>(request, out, out_stride);
}
