// Indexer scores of fp8 queries and keys, on any device.
#include "indexer_mma.cuh"

INDEXER_MMA_ALL(fp8)
