// Rows that are held on chip: their parts, and bins of FP16's roundings of their scores.
#pragma once

#include "select.cuh"

// Bins are the upper bits of FP16 numbers as they are: sign, exponent and five bits of the fraction. A bin's place is its
// number from the top: those of NaN, which is never counted there, and of +inf; down to +0; and up from -0 to -inf. NaN
// comes last.
constexpr unsigned kNanBin = 1023, kZeroBin = 1024, kNegInfinityBin = 2016, kLastPlace = kBins - 1;
__device__ __forceinline__ unsigned swap_place(unsigned bin) { return bin < kZeroBin ? kNanBin - bin : bin; }
__device__ __forceinline__ unsigned place_of(unsigned bin) { return bin == kNanBin ? kLastPlace : swap_place(bin); }

// FP16's roundings of two scores, one in each half. -0 is +0, and NaN has one pattern.
__device__ __forceinline__ unsigned halves_of(__half2 pair) {
  pair = __hadd2(pair, __half2half2(__ushort_as_half(0)));
  unsigned bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
template <class T>
__device__ __forceinline__ unsigned bin_of_score(T x) {
  return (halves_of(half_pair(x, x)) & 0xffff) >> 5;
}

// The least halves of a bin and of those above it, each twice.
struct Limits {
  unsigned low, high;
  __device__ __forceinline__ static unsigned twice(unsigned half) { return half << 16 | half; }
  __device__ __forceinline__ explicit Limits(unsigned place) {
    const unsigned bin = swap_place(place);
    low = twice(bin < kZeroBin || bin == kNegInfinityBin ? bin << 5 : bin << 5 | 31);
    high = twice(bin < kZeroBin ? (bin + 1) << 5 : bin == kZeroBin ? 0 : (bin << 5) - 1);
  }
};
__device__ __forceinline__ __half2 as_pair(unsigned word) {
  __half2 pair;
  memcpy(&pair, &word, sizeof(pair));
  return pair;
}

// A part of a row as whole vectors, of which the first and the last may stick out: elements `low` to `high` of them
// are its scores.
template <class T>
struct Span {
  static constexpr int kWidth = Vector<T>::kWidth;
  const uint4* vectors;
  int low, high;
  int column;  // of the first vector's first element

  __device__ __forceinline__ Span(const T* row, int start, int length) {
    const size_t at = reinterpret_cast<size_t>(row + start);
    low = (int)(at % 16 / sizeof(T));
    vectors = reinterpret_cast<const uint4*>(at & ~(size_t)15);
    high = low + length;
    column = start - low;
  }
  __device__ __forceinline__ bool whole(int j) const { return j * kWidth >= low && (j + 1) * kWidth <= high; }
  __device__ __forceinline__ bool has(int j) const { return j * kWidth < high; }
  __device__ __forceinline__ Vector<T> load(int j) const {
    const uint4 raw = __ldcg(vectors + j);
    Vector<T> v;
    memcpy(&v, &raw, sizeof(v));
    return v;
  }
  static __device__ __forceinline__ Vector<T> none() {
    Vector<T> v;
#pragma unroll
    for (int w = 0; w < kWidth; w++) v.at[w] = from_bits<T>(Bits<T>::kNan);
    return v;
  }
  // A vector that sticks out: NaN where it does. `loaded`: what is inside is there. Out of the way of those that
  // don't.
  __device__ __noinline__ static Vector<T> clip(Vector<T> v, const Span span, int j, bool loaded) {
    const T* data = reinterpret_cast<const T*>(span.vectors);
#pragma unroll
    for (int w = 0; w < kWidth; w++) {
      const int i = j * kWidth + w;
      if (i < span.low || i >= span.high) v.at[w] = from_bits<T>(Bits<T>::kNan);
      else if (!loaded) v.at[w] = data[i];
    }
    return v;
  }
};

// A thread's vectors of a tile, as halves, two to a word.
template <class T>
struct Halves {
  static constexpr int kWidth = Vector<T>::kWidth;
  static constexpr int kPairs = kWidth / 2;
  static constexpr int kWords = kDepth * kPairs;
  static_assert(kWords <= 16, "a word has a bit for each half");

  unsigned words[kWords];

  __device__ __forceinline__ void set(int d, const Vector<T>& v) {
#pragma unroll
    for (int w = 0; w < kPairs; w++) words[d * kPairs + w] = halves_of(half_pair(v.at[2 * w], v.at[2 * w + 1]));
  }
  __device__ __forceinline__ void set_none(int d) {
#pragma unroll
    for (int w = 0; w < kPairs; w++) words[d * kPairs + w] = 0x7fff7fff;  // NaN, which reaches nothing.
  }
  __device__ __forceinline__ void count(int d) const {
#pragma unroll
    for (int w = 0; w < kPairs; w++) {
      count_in(histogram(), (words[d * kPairs + w] & 0xffff) >> 5);
      count_in(histogram(), words[d * kPairs + w] >> 21);
    }
  }
  // Those that reach a limit: of word w the bits w and 16 + w.
  __device__ __forceinline__ unsigned hits(unsigned limit) const {
    unsigned bits = 0;
#pragma unroll
    for (int w = 0; w < kWords; w++) bits |= __hge2_mask(as_pair(words[w]), as_pair(limit)) & 0x00010001u << w;
    return bits;
  }
  // Of a bit: the vector and its element.
  static __device__ __forceinline__ unsigned vector_of(unsigned bit) { return bit % 16 / kPairs; }
  static __device__ __forceinline__ unsigned element_of(unsigned bit) { return bit % kPairs * 2 + bit / 16; }
};

// The counts of this thread's four bins, from the top, without NaN.
__device__ __forceinline__ uint4 counts_from_top() {
  const unsigned first = threadIdx.x * 4;
  if (first >= kZeroBin) return *reinterpret_cast<const uint4*>(histogram() + first);
  const uint4 four = *reinterpret_cast<const uint4*>(histogram() + (kNanBin - 3 - first));
  return make_uint4(first ? four.w : 0, four.z, four.y, four.x);
}
