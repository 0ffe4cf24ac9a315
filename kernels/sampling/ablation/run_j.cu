// Run J: run E by a sort of the row.
constexpr int kThreads = 1024, kCandidates = 4096;
#define VARIANT Truncates::kNever, Searches::kSorted, false, 1
#include "kernels.cuh"

// Twice a row's elements of 8 bytes, for each row.
extern "C" __global__ void lend(u64* scratch) { sort_scratch = scratch; }
