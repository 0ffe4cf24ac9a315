// Run C: run B, duplicates not cut.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kProposed, Searches::kQuaternary, false, 1
#include "kernels.cuh"
