// Indexer scores of fp8 queries and keys of dimension 128, for few rows of queries a sequence, on
// devices of compute capability 9.0.
#include "indexer_wgmma.cuh"

INDEXER_WGMMA_FEW(fp8)
