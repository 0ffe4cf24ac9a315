// Indexer scores of bf16 queries and keys, on devices of compute capability 9.0.
#include "indexer_wgmma.cuh"

INDEXER_WGMMA_ALL(__nv_bfloat16)
