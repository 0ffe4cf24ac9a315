// A cluster of blocks a row: its size is the launch's.
constexpr int kThreads = 512;
#include "cluster.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) select_cluster(const __grid_constant__ Request request) {
  select_cluster<float>(request);
}
