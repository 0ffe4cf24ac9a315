// Run G: run D by binary search.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kMisses, Searches::kBinary, false, 1
#include "kernels.cuh"
