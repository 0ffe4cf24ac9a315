// -inf for what rows of scores don't see.
#include "indexer.cuh"

extern "C" __global__ void indexer_fill(const __grid_constant__ Request r) { fill_unseen(r); }
