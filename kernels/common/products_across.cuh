// Products of a warpgroup whose second operand lies across: of the summed dimension it has a row of
// shared memory for each number, in blocks of 64 columns.
#pragma once
#include "products.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL
// How the tensor cores find an operand. `block` is for one that lies across: its blocks of 64 columns are so many
// bytes apart, and 2048 bytes on are the next 16 summed. For another it is not read, and 0 spares an instruction.
__device__ __forceinline__ uint64_t operand_in_blocks(uint32_t at, uint32_t block = 0) {
  return uint64_t(at >> 4 & 0x3fff) | uint64_t(block >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// The operand so many bytes further on.
__device__ __forceinline__ uint64_t further(uint64_t operand, uint32_t bytes) {
  return (operand & 0xffffffff00000000ull) | (static_cast<uint32_t>(operand) + (bytes >> 4));
}

// Until all but the newest kNewer groups of products are there.
template <int kNewer>
__device__ __forceinline__ void products_wait_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewer) : "memory");
}
// The same, with all of those that `c` takes.
template <int kNewer, int kRegisters>
__device__ __forceinline__ void products_wait_but(float (&c)[kRegisters]) {
  products_wait_but<kNewer>();
  // The registers are written behind the compiler's back: none is read before.
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// c += a b for a of 64 rows and b of 64, 128 or 256 columns, over 16 summed. a lies in registers, as
// multiply_16x8 has it, or in shared memory.
#define MULTIPLY_ACROSS(columns, registers, a_names, b_at, immediates, ...)                                           \
  if constexpr (std::is_same_v<T, __nv_bfloat16>)                                                                     \
    MULTIPLY_ACROSS_OF("bf16", columns, registers, a_names, b_at, immediates, __VA_ARGS__);                           \
  else                                                                                                                \
    MULTIPLY_ACROSS_OF("f16", columns, registers, a_names, b_at, immediates, __VA_ARGS__)
#define MULTIPLY_ACROSS_OF(kind, columns, registers, a_names, b_at, immediates, ...)                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." kind "." kind " {"                              \
               NAMES_##registers "}, " a_names ", %" b_at ", " immediates ";"                                         \
               : ACCUMULATORS_##registers(c, 0)                                                                       \
               : __VA_ARGS__, "l"(b))
#define IN_REGISTERS "r"(a0), "r"(a1), "r"(a2), "r"(a3)

template <typename T>
__device__ __forceinline__ void multiply_across(float (&c)[128], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b) {
  MULTIPLY_ACROSS("256", 128, "{%128, %129, %130, %131}", "132", "1, 1, 1, 1", IN_REGISTERS);
}
template <typename T>
__device__ __forceinline__ void multiply_across(float (&c)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b) {
  MULTIPLY_ACROSS("128", 64, "{%64, %65, %66, %67}", "68", "1, 1, 1, 1", IN_REGISTERS);
}
template <typename T>
__device__ __forceinline__ void multiply_across(float (&c)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b) {
  MULTIPLY_ACROSS("64", 32, "{%32, %33, %34, %35}", "36", "1, 1, 1, 1", IN_REGISTERS);
}
template <typename T>
__device__ __forceinline__ void multiply_across(float (&c)[128], uint64_t a, uint64_t b) {
  MULTIPLY_ACROSS("256", 128, "%128", "129", "1, 1, 1, 0, 1", "l"(a));
}
template <typename T>
__device__ __forceinline__ void multiply_across(float (&c)[32], uint64_t a, uint64_t b) {
  MULTIPLY_ACROSS("64", 32, "%32", "33", "1, 1, 1, 0, 1", "l"(a));
}
#undef IN_REGISTERS
#undef MULTIPLY_ACROSS
#undef MULTIPLY_ACROSS_OF
#endif
