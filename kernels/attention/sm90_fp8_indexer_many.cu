// Indexer scores of fp8 queries and keys of dimension 128, for many rows of queries a sequence, on
// devices of compute capability 9.0.
#include "indexer_wgmma.cuh"

INDEXER_WGMMA_MANY(fp8)
