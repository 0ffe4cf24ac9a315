// Attention over positions, f16.

#include "sparse_fma.cuh"
#include "sparse_mma.cuh"

SPARSE_FMA(__half)
SPARSE_MMA_NARROW(__half)
