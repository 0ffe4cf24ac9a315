// Run I: run C by a sort of the candidates.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kProposed, Searches::kSorted, false, 1
#include "kernels.cuh"

// Twice a row's elements of 8 bytes, for each row.
extern "C" __global__ void lend(u64* scratch) { sort_scratch = scratch; }
