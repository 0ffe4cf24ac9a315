// Indexer scores of f16 queries and keys, on any device.
#include "indexer_mma.cuh"

INDEXER_MMA_ALL(__half)
