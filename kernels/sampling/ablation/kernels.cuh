// The kernels of a run, one block a row: as many to a multiprocessor as have 1024 threads.
#pragma once

#include "../mask.cuh"
#include "../sample.cuh"
#include "alternatives.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    mask(const Request request, float* out, long long out_stride) {
  mask<float, 1>(request, out, out_stride);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    sample(const Request request, const __grid_constant__ DrawSource draws,
           const __grid_constant__ SampleOutputs out) {
  sample<float, 1>(request, draws, out);
}
