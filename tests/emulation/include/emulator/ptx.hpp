// kernels/common/ptx.cuh on the CPU.
#pragma once

#include <emulator/device.hpp>

inline unsigned dynamic_shared_bytes() { return emulator::dynamic_bytes(); }
inline unsigned shared_add(unsigned* word, unsigned by) { return atomicAdd(word, by); }
inline void shared_count(unsigned* word) { atomicAdd(word, 1u); }
inline void add_from_below(unsigned* x, int lanes) {
  const unsigned before = __shfl_up_sync(~0u, *x, lanes);
  if ((int)threadIdx.x % 32 >= lanes) *x += before;
}
inline void prefetch_to_l2(const void*) {}
inline float max_or_nan(float a, float b) {
  if (a != a || b != b) return NAN;
  return a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
}
inline unsigned sign_above(float below, float x) { return x > below ? 0x80000000u : 0; }
template <class Pair>
unsigned signs_above(Pair below, Pair x) {
  return (number(x.x) > number(below.x) ? 0x8000u : 0) | (number(x.y) > number(below.y) ? 0x80000000u : 0);
}
inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float about_inverse(float x) { return 1.0f / x; }
inline void add_below(float* sum, float weight, float x, float threshold) {
  if (x < threshold) *sum += weight;
}
template <class V>
unsigned all_if_above(V a, V b) {
  return a > b ? ~0u : 0;
}
template <class V>
void forget_value(V&) {}
inline double widened(unsigned bits) {
  const unsigned long long wide = bits * (1ull << 29) + (896ull << 52);
  double x;
  memcpy(&x, &wide, sizeof(x));
  return x;
}
