// Integers of the caller's dtype and strides.
#pragma once
#include <cstdint>

// `Ints` in src/attention/cuda/ints.rs.
struct Ints {
  uint64_t at;
  int64_t strides[2];  // in elements
  int32_t bytes;       // of an element: 4, 8, or 0 where there are none
  int32_t unused;

  __device__ __forceinline__ bool present() const { return bytes != 0; }
  // A U32 from 2^31 up is read as negative, as the I32 that it may be.
  __device__ __forceinline__ int64_t get(int64_t i, int64_t j = 0) const {
    const int64_t element = i * strides[0] + j * strides[1];
    if (bytes == 8) return __ldg(reinterpret_cast<const long long*>(at) + element);
    return __ldg(reinterpret_cast<const int*>(at) + element);
  }
};

// The bounds of a row, clamped to [0, length]; empty where the end lies below the start.
__device__ __forceinline__ void clamped_bounds(const Ints& starts, const Ints& ends, int64_t row, uint32_t length,
                                               uint32_t& begin, uint32_t& end) {
  const auto clamp = [length](int64_t x) { return uint32_t(min(max(x, int64_t(0)), int64_t(length))); };
  begin = starts.present() ? clamp(starts.get(row)) : 0;
  end = ends.present() ? clamp(ends.get(row)) : length;
  end = max(begin, end);
}
