// Attention over positions, bf16.

#include "sparse_fma.cuh"
#include "sparse_mma.cuh"

SPARSE_FMA(__nv_bfloat16)
SPARSE_MMA_NARROW(__nv_bfloat16)
