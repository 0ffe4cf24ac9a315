// What ships, without truncation.
constexpr int kThreads = 256, kCandidates = 4096;
#define VARIANT Truncates::kNever, Searches::kRanked, true, 0
#include "kernels.cuh"
