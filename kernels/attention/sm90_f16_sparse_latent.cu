// Multi-head latent attention over positions, f16.

#include "sm90_sparse_latent.cuh"

SPARSE_LATENT(__half)
