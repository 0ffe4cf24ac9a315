// f32 to e4m3: to the nearest, ties to even, and the greatest number beyond it.
#include <cuda_fp8.h>
#include <cstdint>

extern "C" __global__ void fp8_from_f32(const float* from, uint64_t n, __nv_fp8_storage_t* to) {
  const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
    to[i] = __nv_cvt_float_to_fp8(from[i], __NV_SATFINITE, __NV_E4M3);
}
