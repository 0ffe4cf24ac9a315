// The order of all selection: src/order.rs on the device.
#pragma once

constexpr unsigned kNanKey = 0u;
constexpr unsigned kNegInfinityKey = 0x007fffffu;

// Ordered-integer image of x: the sign-flipped bits, with both zeros and all NaNs made one.
__device__ __forceinline__ unsigned key_of(float x) {
  const unsigned bits = __float_as_uint(__fadd_rn(x, 0.0f));  // -0 + 0 is +0.
  const unsigned key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return x != x ? kNanKey : key;
}

// The greatest value whose key is at most this: no number has the key below that of 0, and as bits it is -0.
__device__ __forceinline__ float greatest_up_to(unsigned key) {
  if (key == 0x7fffffffu) key--;
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// The value with this key; for the keys of numbers and infinities.
__device__ __forceinline__ float value_of(unsigned key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
