// Attention over positions of long keys, bf16.

#include "sparse_mma.cuh"

SPARSE_MMA_WIDE(__nv_bfloat16)
