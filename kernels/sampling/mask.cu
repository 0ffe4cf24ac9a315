// Logits with everything outside the kept set at -inf. Survivors keep their bits. In place where
// `out` is the logits: nothing is written before the cut is known.
#include "truncate.cuh"

template <class T>
__device__ void mask(const Request& request, T* out, long long out_stride) {
  extern __shared__ Shared shared[];
  const long long b = blockIdx.x;
  const Kept<T> kept(request, b, *shared);
  const Row<T>& row = kept.row;
  const Row<T> target(out + b * out_stride, row.size);
  const T dropped = from_bits<T>(Bits<T>::kNegInfinity);
  for (int j = threadIdx.x; j < row.vectors(); j += kThreads) {
    const int first = row.first(j);
    Vector<T> v = row.load(j);
#pragma unroll
    for (int w = 0; w < Row<T>::kWidth; w++) {
      if (!kept.holds(widen(v.at[w]), first + w)) v.at[w] = dropped;
    }
    T* at = const_cast<T*>(target.data) + first;
    if (first >= 0 && first + Row<T>::kWidth <= row.size && target.shift == row.shift) {
      uint4 raw;
      memcpy(&raw, &v, sizeof(raw));
      *reinterpret_cast<uint4*>(at) = raw;
    } else {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        if (first + w >= 0 && first + w < row.size) at[w] = v.at[w];
      }
    }
  }
}

#define KERNEL(name, T)                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                                      \
      mask_##name(const Request request, T* out, long long out_stride) {                      \
    mask<T>(request, out, out_stride);                                                        \
  }
FOR_EACH_DTYPE(KERNEL)
