// A cluster of eight blocks a row.
#include "mask.cuh"

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(kThreads, 1)
    mask(const Request request, float* out, long long out_stride) {
  mask<float, 8>(request, out, out_stride);
}
