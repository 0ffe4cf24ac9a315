// Attention over positions of long keys, f16.

#include "sparse_mma.cuh"

SPARSE_MMA_WIDE(__half)
