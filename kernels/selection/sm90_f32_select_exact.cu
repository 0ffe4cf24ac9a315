// A cluster of blocks a row, which have it on chip: its size is the launch's.
constexpr int kThreads = 512;
#include "exact.cuh"

// Two blocks to a multiprocessor, where rows are short: `LONG_PAIR` in src/selection/plan.rs.
extern "C" __global__ void __launch_bounds__(kThreads, 2) select_exact(const __grid_constant__ Request request) {
  select_exact<float>(request);
}
