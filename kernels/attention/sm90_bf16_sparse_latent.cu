// Multi-head latent attention over positions, bf16.

#include "sm90_sparse_latent.cuh"

SPARSE_LATENT(__nv_bfloat16)
