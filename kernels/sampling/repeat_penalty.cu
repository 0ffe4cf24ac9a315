// The repetition penalty in place: each of `count` distinct ids, all inside the vocabulary.
extern "C" __global__ void repeat_penalty(float* logits, const unsigned* ids, unsigned count,
                                          float penalty) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) {
    const float x = logits[ids[i]];
    logits[ids[i]] = x >= 0.0f ? x / penalty : x * penalty;
  }
}
