// Attention over blocks of keys, f16.

#include "sm90_sparse_tile.cuh"

SPARSE_TILE(__half)
