// Logits with everything outside the kept set at -inf. Survivors keep their bits. In place where
// `out` is the logits: nothing is written before the cut is known.
#pragma once

#include "truncate.cuh"

template <class T, int C>
__device__ void mask(const Request& request, T* out, long long out_stride) {
  extern __shared__ uint4 dynamic[];
  const Kept<T, C> kept(request, *reinterpret_cast<Shared<C>*>(dynamic));
  Team<C>::sync();  // In place, no member may still be reading; and none may end while it is read.
  const Row<T>& row = kept.row;
  out += kept.row_index() * out_stride;
  const bool aligned = (size_t)out % 16 / sizeof(T) == row.shift;
  const T dropped = from_bits<T>(Bits<T>::kNegInfinity);
#pragma unroll 1
  for (int j = row.begin + threadIdx.x; j < row.end; j += kThreads) {
    const int first = row.first(j);
    Vector<T> v = row.load(j);
#pragma unroll
    for (int w = 0; w < Row<T>::kWidth; w++) {
      if (!kept.holds(widen(v.at[w]), first + w)) v.at[w] = dropped;
    }
    if (aligned && first >= 0 && first + Row<T>::kWidth <= row.size) {
      uint4 raw;
      memcpy(&raw, &v, sizeof(raw));
      *reinterpret_cast<uint4*>(out + first) = raw;
    } else {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        if (first + w >= 0 && first + w < row.size) out[first + w] = v.at[w];
      }
    }
  }
}
