// The kernels of sample.cu for a cluster of eight blocks a row: for batches that leave most of the
// device idle.
#define TEAM 8
#include "sample.cu"
