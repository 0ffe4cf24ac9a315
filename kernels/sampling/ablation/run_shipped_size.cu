// What ships, with one tile for all loops: 4096 logits.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kProposed, Searches::kRanked, true, 1
#include "kernels.cuh"
