// The keys that rows of queries see, [start, end), from lengths that lie on the device.
#include "ints.cuh"

// A length or offset, kept where sums cannot overflow.
__device__ __forceinline__ int64_t moderate(int64_t x) {
  constexpr int64_t kMost = int64_t(1) << 48;
  return min(max(x, -kMost), kMost);
}

// Decoding: the last `each` rows of every sequence, causal among themselves. One thread a row.
extern "C" __global__ void bounds_decode(Ints lengths, int64_t each, int64_t rows, long long* ends) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; row < rows; row += step) {
    const int64_t length = max(moderate(lengths.get(row / each)), int64_t(0));
    ends[row] = max(length + 1 + row % each - each, int64_t(0));
  }
}

// Packed sequences. One warp a row, which looks for its sequence: the last that it lies in, where
// cumulative lengths that are none leave a choice.
extern "C" __global__ void bounds_packed(Ints queries, Ints keys, Ints offsets, int64_t sequences, int64_t rows,
                                         long long* starts, long long* ends) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t(gridDim.x) * blockDim.x / 32;
  for (int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; row < rows; row += warps) {
    int64_t found = -1;
    for (int64_t first = 0; first < sequences; first += 32) {
      const int64_t b = first + lane;
      const bool in = b < sequences && row >= moderate(queries.get(b)) && row < moderate(queries.get(b + 1));
      const unsigned voted = __ballot_sync(~0u, in);
      if (voted) found = first + 31 - __clz(voted);
    }
    if (lane) continue;
    int64_t start = 0, end = 0;
    if (found >= 0) {
      const int64_t first = moderate(queries.get(found)), past = moderate(queries.get(found + 1));
      start = moderate(keys.get(found));
      end = moderate(keys.get(found + 1));
      const int64_t offset = offsets.present() ? moderate(offsets.get(found)) : (end - start) - (past - first);
      end = max(min(start + offset + (row - first) + 1, end), start);
    }
    starts[row] = start;
    ends[row] = end;
  }
}
