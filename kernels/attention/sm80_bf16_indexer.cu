// Indexer scores of bf16 queries and keys, on any device.
#include "indexer_mma.cuh"

INDEXER_MMA_ALL(__nv_bfloat16)
