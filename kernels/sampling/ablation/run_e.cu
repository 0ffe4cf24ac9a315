// Run E: run C without truncation.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kNever, Searches::kQuaternary, false, 1
#include "kernels.cuh"
