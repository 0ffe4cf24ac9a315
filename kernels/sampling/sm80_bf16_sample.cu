// One block a row.
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample(const Request request, const DrawSource draws, const SampleOutputs out) {
  sample<__nv_bfloat16, 1>(request, draws, out);
}
