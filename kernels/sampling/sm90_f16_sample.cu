// A cluster of eight blocks a row.
#include "sample.cuh"

extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(kThreads, 1)
    sample(const Request request, const DrawSource draws, const SampleOutputs out) {
  sample<__half, 8>(request, draws, out);
}
