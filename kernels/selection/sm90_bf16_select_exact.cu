// A block, or a cluster of blocks, a row, which have it on chip: the cluster's size is the launch's.
constexpr int kThreads = 512;
#include "exact.cuh"
#include "held.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) select_exact(const __grid_constant__ Request request) {
  select_exact<__nv_bfloat16>(request);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) select_held(const __grid_constant__ Request request) {
  select_held<__nv_bfloat16>(request);
}
