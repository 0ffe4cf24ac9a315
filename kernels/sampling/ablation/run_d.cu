// Run D: run C, where the truncation misses.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kMisses, Searches::kQuaternary, false, 1
#include "kernels.cuh"
