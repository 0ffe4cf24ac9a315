// One row of logits, read by 16-byte vectors wherever it starts: from global memory, or a slice of it
// from where it has been copied to on chip.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "order.cuh"
#include "ptx.cuh"

// `kThreads`, the threads of a block, is the including file's.

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ __half2 pair(__half a, __half b) { return __halves2half2(a, b); }
__device__ __forceinline__ __nv_bfloat162 pair(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __halves2bfloat162(a, b);
}

// The dtype's own -inf and NaN, by their bits.
template <class T>
__device__ __forceinline__ T from_bits(unsigned bits);
template <>
__device__ __forceinline__ float from_bits(unsigned bits) { return __uint_as_float(bits); }
template <>
__device__ __forceinline__ __half from_bits(unsigned bits) {
  return __ushort_as_half((unsigned short)bits);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_bits(unsigned bits) {
  return __ushort_as_bfloat16((unsigned short)bits);
}

// What `widen` has made of an element.
template <class T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (std::is_same<T, float>::value) return x;
  else if constexpr (std::is_same<T, __half>::value) return __float2half_rn(x);
  else return from_bits<T>(__float_as_uint(x) >> 16);
}

template <class T> struct Bits;
template <> struct Bits<float> {
  static constexpr unsigned kNegInfinity = 0xff800000u, kNan = 0x7fc00000u;
};
template <> struct Bits<__half> { static constexpr unsigned kNegInfinity = 0xfc00u, kNan = 0x7e00u; };
template <> struct Bits<__nv_bfloat16> {
  static constexpr unsigned kNegInfinity = 0xff80u, kNan = 0x7fc0u;
};

// The greatest number of the dtype below a cutoff: what is above it reaches the cutoff. Of 0 both zeros do.
template <class T>
__device__ __forceinline__ T below_of(float cut) {
  unsigned bits;
  if constexpr (sizeof(T) == 4) {
    bits = __float_as_uint(value_of(key_of(cut) - (cut == 0.0f ? 2 : 1)));
  } else {
    // Toward 0, or to the nearest: if that is too much, one less will do.
    T near;
    if constexpr (std::is_same<T, __half>::value) near = __float2half_rn(cut);
    else near = from_bits<T>(__float_as_uint(cut) >> 16);
    unsigned short half;
    memcpy(&half, &near, sizeof(half));
    bits = half;
    if (widen(near) >= cut) bits = (bits & 0x7fff) == 0 ? 0x8001 : bits & 0x8000 ? bits + 1 : bits - 1;
  }
  return from_bits<T>(bits);
}

template <class T>
struct alignas(16) Vector {
  static constexpr int kWidth = 16 / sizeof(T);
  T at[kWidth];
};

// The greatest element; NaN where any is.
__device__ __forceinline__ float max_or_nan(const Vector<float>& v) {
  return max_or_nan(max_or_nan(v.at[0], v.at[1]), max_or_nan(v.at[2], v.at[3]));
}
// Of half precision, two at a time.
template <class T>
__device__ __forceinline__ float max_or_nan(const Vector<T>& v) {
  typedef decltype(pair(T(), T())) Pair;
  Pair pairs[4];
  memcpy(pairs, &v, sizeof(pairs));
  const Pair most = __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3]));
  return widen(__hmax_nan(most.x, most.y));
}

// The greatest of so many even shares of `n`, of a number that is a power of two or three times one.
__device__ __forceinline__ int share(int n, unsigned shares) {
  const unsigned twos = __ffs(shares) - 1;
  unsigned most = n + shares - 1;
  if (shares >> twos == 3) most = __umulhi(most, 0xaaaaaaabu) >> 1;
  return most >> twos;
}

// By all lanes of a warp. The compiler has loads last that nothing in the same round of a loop waits for: behind all that
// is computed, which they were to run beside. It moves none across a barrier.
__device__ __forceinline__ void loads_go_first() { __syncwarp(); }

// Vectors are aligned, so the first and the last may stick out of the row. `shift` is how many
// elements the first begins before it. A block's slice is the vectors from `begin` to `end`; with
// kStages it may lie on chip, and loads, then of the slice alone, come from there.
template <class T, bool kStages = false>
struct Row {
  static constexpr int kWidth = Vector<T>::kWidth;
  const T* data;
  int size;
  int shift;
  int begin, end;
  const uint4* staged = nullptr;

  __device__ Row(const T* data, int size, int slice, unsigned slices)
      : data(data), size(size), shift((int)((size_t)data % 16 / sizeof(T))) {
    const int length = slice_length(slices);
    begin = min(slice * length, vectors()), end = min(begin + length, vectors());
  }

  // At least 1. A vocabulary leaves room for a vector beyond it in an int.
  __device__ __forceinline__ int vectors() const { return (shift + size + kWidth - 1) / kWidth; }

  // Whole lines but for the last slice, as they lie in memory where the row begins with one.
  static constexpr int kLine = 128 / sizeof(uint4);
  __device__ __forceinline__ int slice_length(unsigned slices) const {
    return (share(vectors(), slices) + kLine - 1) / kLine * kLine;
  }
  // Where in a line the slice begins.
  __device__ __forceinline__ int phase() const { return (int)((size_t)(data + first(begin)) / sizeof(uint4) % kLine); }

  // Position of the first element of vector j; below 0 where it sticks out.
  __device__ __forceinline__ int first(int j) const { return j * kWidth - shift; }

  // Vector j; -inf outside the row, which is in no set.
  __device__ __forceinline__ Vector<T> load(int j) const {
    if (kStages && staged) return load_inside(j);
    return load_global(j);
  }

  // A vector that doesn't stick out.
  __device__ __forceinline__ Vector<T> load_inside(int j) const { return as_vector(load_words(j)); }
  __device__ __forceinline__ uint4 load_words(int j) const {
    if (kStages && staged) return staged[j - begin];
    return load_words_global(j);
  }

  // Any vector of the row, wherever the slice lies.
  __device__ __forceinline__ Vector<T> load_global(int j) const {
    const int at = first(j);
    if (at >= 0 && at + kWidth <= size) return load_inside_global(j);
    return load_edge(data, at, size);
  }

  // Not by way of L1, which has no use for it.
  __device__ __forceinline__ Vector<T> load_inside_global(int j) const { return as_vector(load_words_global(j)); }
  __device__ __forceinline__ uint4 load_words_global(int j) const {
    return __ldcg(reinterpret_cast<const uint4*>(data + first(j)));
  }

  // The words of a vector of -inf.
  static __device__ __forceinline__ uint4 nothing() {
    constexpr unsigned kWord = Bits<T>::kNegInfinity * (sizeof(T) == 4 ? 1 : 0x10001u);
    return {kWord, kWord, kWord, kWord};
  }

  static __device__ __forceinline__ Vector<T> as_vector(uint4 raw) {
    Vector<T> v;
    memcpy(&v, &raw, sizeof(v));
    return v;
  }

  // Few vectors need it, so it is kept out of the code of every pass.
  static __device__ __noinline__ Vector<T> load_edge(const T* data, int at, int size) {
    Vector<T> v;
#pragma unroll
    for (int w = 0; w < kWidth; w++) {
      const int i = at + w;
      v.at[w] = i >= 0 && i < size ? data[i] : from_bits<T>(Bits<T>::kNegInfinity);
    }
    return v;
  }

  // The slice's vectors that a warp has to itself.
  __device__ __forceinline__ void part_of_warp(int* from, int* to) const {
    constexpr int kWarps = kThreads / 32;
    const int warp = threadIdx.x / 32, lines = (end - begin + kLine - 1) / kLine;
    if (lines >= 4 * kWarps) {
      // Whole lines, of which none has two more than another.
      *from = begin + lines * warp / kWarps * kLine, *to = min(begin + lines * (warp + 1) / kWarps * kLine, end);
    } else {
      const int length = (end - begin + kWarps - 1) / kWarps;
      *from = min(begin + warp * length, end), *to = min(*from + length, end);
    }
  }

  // Sends for the beginning of the slice, to L2: a line a thread.
  __device__ __forceinline__ void prefetch() const {
    const int j = begin + (int)threadIdx.x * kLine;
    if (j < end) prefetch_to_l2(data + max(first(j), 0));
  }

  // f(vectors, index of the first) for tiles of the slice's whole vectors: a tile's are `kThreads`
  // apart, and -inf beyond the last. Each thread has a tile of loads in flight while it looks at the one
  // before. All lanes of a warp come to each of its tiles.
  template <int kDepth, class F>
  __device__ __forceinline__ void for_each_tile(F f) const {
    int from, to;
    whole_vectors(&from, &to);
    const int lane = threadIdx.x % 32;
    int j = from + threadIdx.x;
    // In words: as elements of half precision they would be taken apart, and waited for, when they are sent for.
    uint4 own[kDepth];
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      if (j + d * kThreads < to) own[d] = load_words(j + d * kThreads);
    }
#pragma unroll 1
    while (j - lane < to) {
      const int ahead = j + kDepth * kThreads;
      uint4 next[kDepth];
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
        if (ahead + d * kThreads < to) next[d] = load_words(ahead + d * kThreads);
      }
      loads_go_first();
      if (ahead - kThreads >= to) {
#pragma unroll
        for (int d = 0; d < kDepth; d++) {
          if (j + d * kThreads >= to) own[d] = nothing();
        }
      }
      Vector<T> v[kDepth];
#pragma unroll
      for (int d = 0; d < kDepth; d++) v[d] = as_vector(own[d]);
      f(v, j);
#pragma unroll
      for (int d = 0; d < kDepth; d++) own[d] = next[d];
      j = ahead;
    }
  }

  // Whether the thread is to look at one of the slice's vectors that stick out: the first and the last
  // may.
  __device__ __forceinline__ bool has_edge(int* at) const {
    *at = threadIdx.x == 0 ? begin : end - 1;
    return threadIdx.x < (end - begin > 1 ? 2 : end - begin) && (first(*at) < 0 || first(*at) + kWidth > size);
  }

  // The slice's whole vectors.
  __device__ __forceinline__ void whole_vectors(int* from, int* to) const {
    *from = begin == 0 && shift > 0 ? 1 : begin, *to = min(end, (shift + size) / kWidth);
  }
  // A whole vector, or -inf.
  __device__ __forceinline__ Vector<T> load_whole(int j, bool is_whole) const {
    return is_whole ? load_inside(j) : as_vector(nothing());
  }

  // f(logit, position) for every element of the slice once, and with -inf for the few positions
  // outside the row that its outer vectors hold. For a pass that computes: one vector ahead, and one
  // copy of f in the code.
  template <class F>
  __device__ __forceinline__ void for_each(F f) const {
    int j = begin + threadIdx.x;
    Vector<T> v;
    if (j < end) v = load(j);
#pragma unroll 1
    for (; j < end; j += kThreads) {
      Vector<T> next;
      if (j + kThreads < end) next = load(j + kThreads);
#pragma unroll
      for (int w = 0; w < kWidth; w++) f(widen(v.at[w]), first(j) + w);
      v = next;
    }
  }
};
