// What ships, where the truncation misses.
constexpr int kThreads = 256, kCandidates = 4096;
#define VARIANT Truncates::kMisses, Searches::kRanked, true, 0
#include "kernels.cuh"
