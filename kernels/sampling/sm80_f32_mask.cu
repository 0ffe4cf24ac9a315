// One small block a row, four to a multiprocessor: while one searches, others stream.
constexpr int kThreads = 256, kCandidates = 4096;
#include "mask.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    mask(const Request request, float* out, long long out_stride) {
  mask<float, 1>(request, out, out_stride);
}
