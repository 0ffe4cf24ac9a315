// Steps of decoding whose lengths lie on the device, and rows that attend to all before them.
#include <cstdint>

// A step of `each` tokens for every sequence: the ends of their rows, and the lengths behind them. A sequence
// of negative length rests, and one that would outgrow `most` does from then on: its rows have an end of 0, which
// says that they see nothing and have no place. One thread a sequence.
extern "C" __global__ void steps_advance(int32_t* lengths, int32_t sequences, int32_t each, int32_t most,
                                         uint32_t* ends) {
  const int32_t sequence = blockIdx.x * blockDim.x + threadIdx.x;
  if (sequence >= sequences) return;
  const int32_t length = lengths[sequence];
  const bool runs = length >= 0 && length <= most - each;
  for (int32_t i = 0; i < each; ++i)
    ends[int64_t(sequence) * each + i] = runs ? uint32_t(length + i + 1) : 0;
  if (runs) lengths[sequence] = length + each;
}

// The positions below each row's end, of which there are no more than k, and behind them none.
extern "C" __global__ void steps_everything(const uint32_t* ends, uint64_t count, uint32_t k, uint32_t* positions) {
  const uint64_t step = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint32_t position = uint32_t(i % k);
    positions[i] = position < ends[i / k] ? position : ~0u;
  }
}
