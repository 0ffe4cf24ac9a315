// Blocks of 512 threads, three to a multiprocessor: while one refines, others stream.
constexpr int kThreads = 512;
#include "block.cuh"
#include "split.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 3) select_block(const __grid_constant__ Request request) {
  select_block<float, false>(request);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) select_split(const __grid_constant__ Request request) {
  select_split<float>(request);
}
