// One wide block a row, which it holds in registers.
constexpr int kThreads = 1024;
#include "block.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) select_row_local(const __grid_constant__ Request request) {
  select_block<__half, true>(request);
}
