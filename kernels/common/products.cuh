// Matrix products on tensor cores. Operands lie in shared memory in rows of 128 bytes along the summed
// dimension whose 16-byte vectors are swizzled: vector v of row r is at v ^ (r & 7). Rows that are longer
// continue in another such block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

#include "accumulators.cuh"

// e4m3, as stored.
struct fp8 {
  uint8_t bits;
};

// Four matrices of 8 rows of 16 bytes; lane i gives the address of row i % 8 of matrix i / 8, and gets
// 4 bytes, number lane % 4, of row lane / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// The same of matrices that lie across: row and number within it change places.
__device__ __forceinline__ void load_matrices_across(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// c += a b for a of 16 rows and b of 8 columns, over 16 summed.
template <class T>
__device__ __forceinline__ void multiply_16x8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four e4m3 as two pairs of f16, which hold every one of them exactly. For devices that cannot convert.
__device__ __forceinline__ void widen_fp8(uint32_t four, uint32_t& low, uint32_t& high) {
  const auto pair = [](uint32_t bytes) {
    // As f16 bits the exponent is 8 too low.
    const uint32_t bits = (bytes & 0x80008000) | (bytes & 0x7f007f00) >> 1;
    const __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256));
    // 448 is the greatest number; what would be 480 is NaN.
    const unsigned nan = __heq2_mask(__habs2(scaled), __float2half2_rn(480));
    return *reinterpret_cast<const uint32_t*>(&scaled) | nan;
  };
  low = pair(__byte_perm(four, 0, 0x1404));
  high = pair(__byte_perm(four, 0, 0x3424));
}

#if __CUDA_ARCH_FEAT_SM90_ALL
// How the tensor cores find such an operand, of 8 rows a KB; + 2 for the next 32 bytes along the rows.
__device__ __forceinline__ uint64_t operand(uint32_t at) {
  return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 16 | (at & 0x3ffff) >> 4;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all products of the warpgroup are there.
template <int kRegisters>
__device__ __forceinline__ void products_wait(float (&c)[kRegisters]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  // The registers are written behind the compiler's back: none is read before.
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// c = a b, or c += a b where `sum`, for a of 64 rows and b of 64 or 128 columns, over 32 bytes of each.
// c[4 j + i] is row lane / 4 + 8 (i / 2) of the warp's 16 and column 8 j + 2 (lane % 4) + i % 2, as it is
// in multiply_16x8.
#define MULTIPLY_64(columns, registers, a_at, b_at, sum_at, kind, depth, transposed)                                  \
  asm volatile(                                                                                                       \
      "{\n.reg .pred sum;\nsetp.ne.b32 sum, %" sum_at ", 0;\n"                                                        \
      "wgmma.mma_async.sync.aligned.m64n" columns "k" depth ".f32." kind "." kind " {"                                \
      NAMES_##registers "}, %" a_at ", %" b_at ", sum, 1, 1" transposed ";\n}"                                        \
      : ACCUMULATORS_##registers(c, 0)                                                                                \
      : "l"(a), "l"(b), "r"(int(sum)))
#define MULTIPLY_64X64(kind, depth, transposed) MULTIPLY_64("64", 32, "32", "33", "34", kind, depth, transposed)
#define MULTIPLY_64X128(kind, depth, transposed) MULTIPLY_64("128", 64, "64", "65", "66", kind, depth, transposed)

template <class T>
__device__ __forceinline__ void multiply_64(float (&c)[32], uint64_t a, uint64_t b, bool sum) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    MULTIPLY_64X64("bf16", "16", ", 0, 0");
  else if constexpr (std::is_same_v<T, __half>)
    MULTIPLY_64X64("f16", "16", ", 0, 0");
  else
    MULTIPLY_64X64("e4m3", "32", "");
}

template <class T>
__device__ __forceinline__ void multiply_64(float (&c)[64], uint64_t a, uint64_t b, bool sum) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    MULTIPLY_64X128("bf16", "16", ", 0, 0");
  else if constexpr (std::is_same_v<T, __half>)
    MULTIPLY_64X128("f16", "16", ", 0, 0");
  else
    MULTIPLY_64X128("e4m3", "32", "");
}
#undef MULTIPLY_64X64
#undef MULTIPLY_64X128
#undef MULTIPLY_64
#endif
