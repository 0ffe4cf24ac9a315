// Multi-head latent attention over positions of few rows, bf16.

#include "sm90_sparse_latent_few.cuh"

SPARSE_LATENT_FEW(__nv_bfloat16)
