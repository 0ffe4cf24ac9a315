// A layer's rows between its products, f16.

#include "dsa.cuh"

DSA(__half)
