// Indexer scores of bf16 queries and keys of any dimension, on
// devices of compute capability 9.0.
#include "indexer_wgmma.cuh"

INDEXER_WGMMA_ANY(__nv_bfloat16)
