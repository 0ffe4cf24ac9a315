// A layer's rows between its products, f32.

#include "dsa.cuh"

DSA(float)
