// Attention over positions, f32.

#include "sparse_fma.cuh"

SPARSE_FMA(float)
