// Run B: run A with one tile for all loops: 4096 logits.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kProposed, Searches::kQuaternary, true, 1
#include "kernels.cuh"
