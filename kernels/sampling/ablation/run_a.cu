// Run A: the paper's algorithm in these kernels: truncation, quaternary search, duplicates, tuned sizes.
constexpr int kThreads = 256, kCandidates = 4096;
#define VARIANT Truncates::kProposed, Searches::kQuaternary, true, 0
#include "kernels.cuh"
