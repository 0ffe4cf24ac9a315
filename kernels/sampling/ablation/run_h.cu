// Run H: run E by binary search.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kNever, Searches::kBinary, false, 1
#include "kernels.cuh"
