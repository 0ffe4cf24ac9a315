// Indexer scores of fp8 queries and keys of any dimension, on
// devices of compute capability 9.0.
#include "indexer_wgmma.cuh"

INDEXER_WGMMA_ANY(fp8)
