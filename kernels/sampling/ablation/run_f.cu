// Run F: run C by binary search.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kProposed, Searches::kBinary, false, 1
#include "kernels.cuh"
