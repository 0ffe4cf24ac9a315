constexpr int kThreads = 512;
#include "block.cuh"
#include "short.cuh"
#include "split.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2) select_short(const __grid_constant__ Request request) {
  select_short<__half>(request);
}

// Two blocks to a multiprocessor: while one refines, the other streams.
extern "C" __global__ void __launch_bounds__(kThreads, 2) select_block(const __grid_constant__ Request request) {
  select_block<__half, false>(request);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) select_row_local(const __grid_constant__ Request request) {
  select_block<__half, true>(request);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) select_split(const __grid_constant__ Request request) {
  select_split<__half>(request);
}
