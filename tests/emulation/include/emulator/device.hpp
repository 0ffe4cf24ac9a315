// As much of CUDA C++ as the kernels of sampling and selection use, on the CPU: a block is an OS thread, its threads
// are fibers of it, so that shared memory is the OS thread's own. What the device does at one moment (a step of
// a warp, a barrier) all fibers concerned do before one goes on; in between, warps run in random order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
// Before names of CUDA are defined that their attributes use, too.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static thread_local

#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_MAX_NORMAL_F 3.402823466e38f
#define CUDART_L2E_F 1.442695041f

struct dim {
  unsigned x;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
struct alignas(4) uchar4 {
  unsigned char x, y, z, w;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
extern constinit thread_local dim threadIdx, blockIdx;
// As much as a block has.
extern constinit thread_local uint4 dynamic[(227 << 10) / sizeof(uint4)];

// What the runtime does for the fiber that calls.
namespace emulator {
void sync_threads();
// Whether anybody has said so.
bool sync_threads_or(bool said);
// Once all of the warp have called, for the same: what each has said.
void exchange(const void* what, unsigned mask, uint64_t said, uint64_t (&all)[32]);
// Lets other fibers run.
void yield();
// A bulk copy, and to whom it is said that it is there.
struct Copy {
  void* to;
  const void* from;
  unsigned size;
  void* mail;
};
// Those of the block that are on their way.
std::vector<Copy>& copies();
// Of the block's random order.
unsigned random();
unsigned dynamic_bytes();
unsigned blocks_of_cluster();
unsigned rank_in_cluster();
void cluster_arrive();
void cluster_wait();
// Where a member of the cluster has what the caller has at `object`.
void* of_member(const void* object, unsigned rank);
}  // namespace emulator

inline void __syncthreads() { emulator::sync_threads(); }
inline int __syncthreads_or(int p) { return emulator::sync_threads_or(p != 0); }
inline void __syncwarp() {
  static const char what = 0;
  uint64_t all[32];
  emulator::exchange(&what, ~0u, 0, all);
}

// A warp's lanes all take part. A lambda's type tells the steps apart.
template <class V, class Source>
V shuffled(unsigned mask, V v, Source source) {
  static_assert(sizeof(V) <= 8);
  static const char what = 0;
  uint64_t said = 0, all[32];
  memcpy(&said, &v, sizeof(v));
  emulator::exchange(&what, mask, said, all);
  memcpy(&v, &all[source((int)threadIdx.x % 32) & 31], sizeof(v));
  return v;
}
template <class V>
V __shfl_sync(unsigned mask, V v, int lane) {
  return shuffled(mask, v, [&](int) { return lane; });
}
template <class V>
V __shfl_xor_sync(unsigned mask, V v, int lanes) {
  return shuffled(mask, v, [&](int lane) { return lane ^ lanes; });
}
template <class V>
V __shfl_up_sync(unsigned mask, V v, int lanes) {
  return shuffled(mask, v, [&](int lane) { return lane >= lanes ? lane - lanes : lane; });
}
template <class Op>
unsigned combined(unsigned mask, unsigned v, Op op) {
  static const char what = 0;
  uint64_t all[32];
  emulator::exchange(&what, mask, v, all);
  unsigned result = (unsigned)all[0];
  for (int lane = 1; lane < 32; lane++) result = op(result, (unsigned)all[lane]);
  return result;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) {
  return combined(mask, v, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
  return combined(mask, v, [](unsigned a, unsigned b) { return std::min(a, b); });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  return combined(mask, v, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  return combined(mask, p ? 1u << threadIdx.x % 32 : 0u, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }

// Members of a cluster may do so at once.
template <class V, class Op>
V updated(V* at, Op op) {
  V was = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &was, op(was), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
  }
  return was;
}
template <class V, class W>
V atomicAdd(V* at, W v) {
  return updated(at, [&](V x) { return (V)(x + (V)v); });
}
template <class V, class W>
V atomicSub(V* at, W v) {
  return updated(at, [&](V x) { return (V)(x - (V)v); });
}
inline unsigned atomicOr(unsigned* at, unsigned v) {
  return updated(at, [&](unsigned x) { return x | v; });
}
inline unsigned atomicMin(unsigned* at, unsigned v) {
  return updated(at, [&](unsigned x) { return std::min(x, v); });
}
inline unsigned atomicMax(unsigned* at, unsigned v) {
  return updated(at, [&](unsigned x) { return std::max(x, v); });
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <class V>
V __ldcg(const V* at) {
  return *at;
}
template <class V>
void __stcs(V* at, V v) {
  *at = v;
}

template <class V>
void __stcg(V* at, V v) {
  *at = v;
}

inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return by & 31 ? high << (by & 31) | low >> (32 - (by & 31)) : high;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned __int128)a * b >> 64;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof(x));
  return bits;
}
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rd(double a, double b) {
  // What the sum is rounded by is exact.
  const double sum = a + b, of_b = sum - a;
  return (a - (sum - of_b)) + (b - of_b) < 0.0 ? std::nextafter(sum, -INFINITY) : sum;
}
inline long long __double_as_longlong(double x) {
  long long bits;
  memcpy(&bits, &x, sizeof(x));
  return bits;
}
inline double __ull2double_rn(unsigned long long x) { return (double)x; }
inline unsigned __float2uint_rz(float x) { return !(x > 0.0f) ? 0u : x >= 0x1p32f ? ~0u : (unsigned)x; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __log2f(float x) { return log2f(x); }
inline float normcdfinvf(float p) {
  float low = -40.0f, high = 40.0f;
  for (int i = 0; i < 60; i++) {
    const float middle = (low + high) / 2;
    (0.5 * erfc(-middle * 0.70710678118654752) < p ? low : high) = middle;
  }
  return low;
}

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}

struct __half {
  unsigned short bits;
};
struct __nv_bfloat16 {
  unsigned short bits;
};
struct __half2 {
  __half x, y;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
inline float __half2float(__half x) {
  const unsigned sign = (unsigned)(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 0x3ff;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  const float size = exponent ? ldexpf((float)(fraction | 0x400), (int)exponent - 25) : ldexpf((float)fraction, -24);
  return sign ? -size : size;
}
inline __half __float2half_rn(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return {0x7fff};
  if (size >= 0x477ff000u) return {(unsigned short)(sign | 0x7c00)};
  // In units of the last place of the result, to even by the current rounding.
  const int exponent = std::max((int)(size >> 23) - 127, -14);
  const unsigned units = (unsigned)nearbyintf(ldexpf(__uint_as_float(size), 10 - exponent));
  return {(unsigned short)(sign | ((unsigned)(exponent + 14) * 1024 + units))};
}
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __hadd2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) + __half2float(b.x), __half2float(a.y) + __half2float(b.y));
}
inline unsigned __hge2_mask(__half2 a, __half2 b) {
  return (__half2float(a.x) >= __half2float(b.x) ? 0xffffu : 0u) |
         (__half2float(a.y) >= __half2float(b.y) ? 0xffff0000u : 0u);
}
inline float number(__half x) { return __half2float(x); }
inline float number(__nv_bfloat16 x) { return __bfloat162float(x); }
// NaN where either is.
template <class H>
H __hmax_nan(H a, H b) {
  const float x = number(a), y = number(b);
  return x != x ? a : y != y ? b : x >= y ? a : b;
}
template <class P>
P __hmax2_nan(P a, P b) {
  return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)};
}

// The greater, NaN aside.
template <class H>
H __hmax(H a, H b) {
  const float x = number(a), y = number(b);
  return x != x ? b : y != y ? a : x >= y ? a : b;
}
template <class P>
P __hmax2(P a, P b) {
  return {__hmax(a.x, b.x), __hmax(a.y, b.y)};
}

namespace cooperative_groups {
struct Cluster {
  unsigned block_rank() const { return emulator::rank_in_cluster(); }
  unsigned num_blocks() const { return emulator::blocks_of_cluster(); }
  void sync() const { emulator::cluster_arrive(), emulator::cluster_wait(); }
  void barrier_wait() const { emulator::cluster_wait(); }
  template <class V>
  V* map_shared_rank(V* object, unsigned rank) const {
    return (V*)emulator::of_member(object, rank);
  }
};
inline Cluster this_cluster() { return {}; }
// Each thread is a group: which come together, no kernel may depend on.
struct Alone {
  unsigned thread_rank() const { return 0; }
  unsigned size() const { return 1; }
  template <class V>
  V shfl(V v, unsigned) const {
    return v;
  }
};
inline Alone coalesced_threads() { return {}; }
}  // namespace cooperative_groups
