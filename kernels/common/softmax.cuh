// Softmax weights and their exact sums: src/sampling/softmax.rs on the device, operation for
// operation, so that both backends see the same bits. Compiled without fused multiply-add.
#pragma once

#include <math_constants.h>

#include "ptx.cuh"

typedef unsigned long long u64;

// A sum of weights in units of 2^-62: an integer, so that its order does not show.
struct Mass {
  u64 low, high;
};

__device__ __forceinline__ Mass operator+(Mass a, Mass b) {
  const u64 low = a.low + b.low;
  return {low, a.high + b.high + (low < a.low)};
}

__device__ __forceinline__ Mass operator-(Mass a, Mass b) {
  return {a.low - b.low, a.high - b.high - (a.low < b.low)};
}

__device__ __forceinline__ bool operator<(Mass a, Mass b) {
  return a.high != b.high ? a.high < b.high : a.low < b.low;
}

__device__ __forceinline__ Mass times(u64 weight, u64 count) {
  return {weight * count, __umul64hi(weight, count)};
}

// A mass in digits of 16 bits, which a warp adds with one instruction each.
__device__ __forceinline__ Mass warp_sum(Mass m) {
  // Two digits' totals in a word of 37 bits.
  u64 words[3];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const unsigned two = (unsigned)(i == 2 ? m.high : m.low >> i * 32);
    const unsigned lower = __reduce_add_sync(~0u, two & 0xffffu), upper = __reduce_add_sync(~0u, two >> 16);
    words[i] = ((u64)upper << 16) + lower;
  }
  return Mass{words[0], words[2]} + Mass{words[1] << 32, words[1] >> 32};
}

// The logarithm of a mass above 0, as a sum of weights.
__device__ __forceinline__ double log_mass(Mass m) {
  const double raw = __ull2double_rn(m.high) * 18446744073709551616.0 + __ull2double_rn(m.low);
  return log(raw / 4611686018427387904.0);
}

// The least mass that is not below p times `total`, for a p between 0 and 1.
__device__ __forceinline__ Mass nucleus(float p, Mass total) {
  const unsigned bits = __float_as_uint(p), exponent = bits >> 23;
  // p is a fraction of 24 bits over 2^shift, and no mass of a row has more than 93.
  const u64 fraction = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0);
  const unsigned shift = 150 - (exponent ? exponent : 1);
  const Mass product = times(total.low, fraction) + Mass{0, total.high * fraction};
  const Mass up = {0ull - 1, shift < 64 ? 0 : shift < 128 ? (1ull << (shift - 64)) - 1 : 0ull - 1};
  const Mass sum = product + (shift < 64 ? Mass{(1ull << shift) - 1, 0} : up);
  if (shift < 64) return {sum.low >> shift | sum.high << (64 - shift), sum.high >> shift};
  return {shift < 128 ? sum.high >> (shift - 64) : 1, 0};
}

// floor(total * draw / 2^64).
__device__ __forceinline__ Mass inverted(Mass total, u64 draw) {
  return times(total.high, draw) + Mass{__umul64hi(total.low, draw), 0};
}

struct Softmax {
  float max;
  // Both sides of the quotient are scaled by this power of two, so that the difference of two finite
  // values does not overflow.
  float scale, scaled_max, scaled_temperature;

  __device__ Softmax(float max, float temperature) : max(max) {
    // Below 2^100 the difference to -FLT_MAX still rounds to a finite value.
    scale = max < 0x1p100f ? 1.0f : 0.5f;
    scaled_max = max * scale;
    scaled_temperature = (max == CUDART_INF_F ? 1.0f : temperature) * scale;
  }

  // (x - max) / T, at most 0; for what is above -inf.
  __device__ __forceinline__ float exponent(float x) const {
    float z = x * scale - scaled_max;
    if (scaled_temperature != 1.0f) z = z / scaled_temperature;
    return x == max ? 0.0f : z;
  }

  // exp(z) over 2^n, where n is the integer next to z / ln 2: in `shifted`, as the last bits of its sum with this.
  static constexpr float kRound = 12582912.0f;
  static __device__ __forceinline__ float fraction(float z, float* shifted) {
    *shifted = z * 1.44269504088896340736f + kRound;
    const float n = *shifted - kRound;
    float r = __fmaf_rn(-n, 0.693359375f, z);  // The product is exact.
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 0.5f;
    return p * (r * r) + r + 1.0f;
  }

  __device__ __forceinline__ float weight(float x) const {
    const float z = exponent(x);
    if (!(x > -CUDART_INF_F) || !(z >= -43.0f)) return 0.0f;
    float shifted;
    const float e = fraction(z, &shifted);
    const int bias = __float_as_int(shifted) - __float_as_int(kRound);
    return e * __uint_as_float((unsigned)(bias + 127) << 23);
  }

  // The weight in units of 2^-62, rounded down.
  __device__ __forceinline__ u64 mass(float x) const { return mass_of(weight(x)); }
  // Of a weight: its fraction, shifted. A conversion is slower.
  static __device__ __forceinline__ u64 mass_of(float w) {
    const unsigned bits = __float_as_uint(w);
    if (!(w > 0.0f)) return 0;
    // 1 has the exponent 127, and none is below 2^-63.
    return (u64)((bits << 7 & 0x3fffffffu) | 0x40000000u) << 32 >> (127 - (bits >> 23));
  }

  // The log-probability of a logit in a set whose mass has this logarithm.
  __device__ __forceinline__ float log_weight(float x, double log_mass) const {
    return log_weight(x, exponent(x), log_mass);
  }
  __device__ __forceinline__ float log_weight(float x, float exponent, double log_mass) const {
    if (max == CUDART_INF_F && x != max) return -CUDART_INF_F;
    return (float)((double)exponent - log_mass);
  }
};

// A weight where speed matters less than the size of the code, which the driver compiles when it is
// first loaded.
__device__ __noinline__ u64 mass_of_few(const Softmax softmax, float x) { return softmax.mass(x); }

// How a pass over many logits of a row makes exponents: of most rows an exponent is the difference to the maximum alone,
// or that by a temperature that is far from all limits.
enum class Exponents { kDifference, kQuotient, kAny };

// The weights of many logits of one row, and their exact sum by one thread: the same bits as Softmax's, in fewer
// instructions.
//
// A weight is added in f64 to a sum that is a multiple of 2^-30, whatever it is rounded to; what the rounding leaves is
// exact, and added to another sum, of multiples of 2^-62, rounded down. Both sums stay multiples of their unit, below
// 2^53 of them: so they are integers, and no order shows. A mass is rounded down once, at 2^-62, and so is it here: what
// the first sum takes of it is a multiple of that.
template <Exponents kExponents>
struct Weights {
  static constexpr bool kSums = true;
  float max, temperature, reciprocal;

  __device__ explicit Weights(const Softmax& softmax)
      : max(softmax.max), temperature(softmax.scaled_temperature), reciprocal(1.0f / softmax.scaled_temperature) {}

  // Of a number, or 0 where `counts` is false. What is -inf or NaN has none.
  __device__ __forceinline__ float of(float x, bool counts = true) const {
    float z = x - max;
    if constexpr (kExponents == Exponents::kQuotient) {
      // The quotient: by the reciprocal it is off by less than 2 units in the last place, after one correction by less
      // than 1, and after the second it is the rounded one (Markstein). Of what is infinite they make NaN. Exponents
      // closer to 0 than 2^-26, where a remainder might not be exact, have the weight 1 whatever they are.
      float q = z * reciprocal;
      q = __fmaf_rn(__fmaf_rn(-q, temperature, z), reciprocal, q);
      z = __fmaf_rn(__fmaf_rn(-q, temperature, z), reciprocal, q);
    }
    float shifted;
    const float e = Softmax::fraction(z, &shifted);
    // Times 2^n: what is shifted out of `shifted` are the bits of kRound.
    const float weight = __uint_as_float(__float_as_uint(e) + (__float_as_uint(shifted) << 23));
    return counts && z >= -43.0f ? weight : 0.0f;
  }

  // So many weights fit into a thread's sum, even all of them 1.
  static constexpr int kMost = 1 << 20;
  struct Sum {
    double high = 0x1p22, low = 0x1.8p-10;

    // The fraction and the exponent where f64 has them, by one instruction where a conversion waits for its unit. 0 comes
    // out as 2^-127, of which nothing is left in a sum that is rounded down.
    static __device__ __forceinline__ double wide(float weight) { return widened(__float_as_uint(weight)); }
    __device__ __forceinline__ void add(float weight) {
      const double its = wide(weight), next = high + its;
      low = __dadd_rd(low, its - (next - high)), high = next;
    }
    // Where the weight is in one sum it may be in another, too.
    __device__ __forceinline__ void add(float weight, Sum& other, bool in_other) {
      const double its = wide(weight), whole = its + 0x1.8p22 - 0x1.8p22, rest = its - whole;
      high += whole, low = __dadd_rd(low, rest);
      if (in_other) other.high += whole, other.low = __dadd_rd(other.low, rest);
    }
    // By their bits: the beginning's are 0 of the first, and half the range of the other.
    __device__ __forceinline__ Mass mass() const {
      const u64 whole = (u64)__double_as_longlong(high) & (1ull << 52) - 1;
      const long long rest = __double_as_longlong(low) - __double_as_longlong(0x1.8p-10);
      return Mass{whole << 32, whole >> 32} + Mass{(u64)rest, (u64)(rest >> 63)};
    }
  };
};

// For all other rows, and those of more than a thread's sum holds: by integers.
template <>
struct Weights<Exponents::kAny> {
  static constexpr bool kSums = true;
  Softmax softmax;

  __device__ explicit Weights(const Softmax& softmax) : softmax(softmax) {}
  __device__ __forceinline__ float of(float x, bool counts = true) const { return counts ? softmax.weight(x) : 0.0f; }

  struct Sum {
    Mass sum = {0, 0};

    __device__ __forceinline__ void add(float weight) { sum = sum + Mass{Softmax::mass_of(weight), 0}; }
    __device__ __forceinline__ void add(float weight, Sum& other, bool in_other) {
      const Mass mass = {Softmax::mass_of(weight), 0};
      sum = sum + mass;
      if (in_other) other.sum = other.sum + mass;
    }
    __device__ __forceinline__ Mass mass() const { return sum; }
  };
};

// f(the way) for a row of which a thread adds up so many, at most.
template <Exponents kExponents>
struct Way {
  static constexpr Exponents kWay = kExponents;
};
template <class F>
__device__ __forceinline__ void by_exponents(const Softmax& softmax, int each, F f) {
  const float t = softmax.scaled_temperature;
  const bool any = softmax.scale != 1.0f || !(fabsf(softmax.max) < CUDART_INF_F) || !(t >= 0x1p-30f && t <= 0x1p30f);
  if (any || each > Weights<Exponents::kDifference>::kMost) f(Way<Exponents::kAny>());
  else if (t == 1.0f) f(Way<Exponents::kDifference>());
  else f(Way<Exponents::kQuotient>());
}
