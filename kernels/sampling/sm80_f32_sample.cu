// One block a row.
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample(const Request request, const DrawSource draws, unsigned* tokens,
           unsigned* notes, unsigned refused) {
  sample<float, 1>(request, draws, tokens, notes, refused);
}
