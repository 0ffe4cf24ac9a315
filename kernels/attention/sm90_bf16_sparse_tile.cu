// Attention over blocks of keys, bf16.

#include "sm90_sparse_tile.cuh"

SPARSE_TILE(__nv_bfloat16)
