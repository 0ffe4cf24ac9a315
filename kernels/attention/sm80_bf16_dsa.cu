// A layer's rows between its products, bf16.

#include "dsa.cuh"

DSA(__nv_bfloat16)
