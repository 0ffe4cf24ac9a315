// Indexer scores of f32 queries and keys, on any device.
#include "indexer_mma.cuh"

INDEXER_MMA_ALL(float)
