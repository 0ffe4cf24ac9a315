// Copies from global to shared memory that a thread does not wait for, the barriers of shared memory
// that say when they are there, and the hand-over of registers among warpgroups.
#pragma once
#include <cstdint>

#ifdef CANDLE_TOPK_EMULATOR
#include <emulator/pipeline.hpp>
#else

// The address of an object in shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* object) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(object));
}

// 16 bytes, of which the first `bytes` are read and the others 0. Past L1.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// A vector, to the block's shared memory.
__device__ __forceinline__ void copy_16(uint4* to, const uint4* from) { copy_16(shared_address(to), from, 16); }
// 4 bytes, likewise.
__device__ __forceinline__ void copy_4(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the newest kNewer groups of this thread's copies are there.
template <int kNewer>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewer) : "memory");
}

__device__ __forceinline__ void put_16(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ float4 get_16(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from));
  return v;
}

#if __CUDA_ARCH__ >= 900
// A barrier in shared memory, of phases counted from 0.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// An arrival, one of those that the barrier counts, as soon as this thread's copies are there.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// The same, where some of it this thread may have stored itself: an arrival publishes what was stored before it, the
// end of copies only what they copied.
__device__ __forceinline__ void barrier_arrive_after_fetching(uint32_t barrier, bool copied) {
  if (copied) {
    barrier_arrive_after_copies(barrier);
  } else {
    asm volatile("cp.async.wait_all;\nfence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive(barrier);
  }
}
// Until a phase of this parity has ended. The phase before the first has parity 1.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred there;\n"
      "wait_%=: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
      "@there bra done_%=;\nbra wait_%=;\ndone_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// The same, and so many bytes by tile copies are waited for.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// A tensor as the driver describes it for tile copies.
struct alignas(64) TensorMap {
  uint64_t words[16];
};
// Copies the tile at these coordinates, the innermost first, by one thread. What lies outside of the tensor
// becomes 0.
__device__ __forceinline__ void copy_tile(uint32_t to, const TensorMap& tensor, uint32_t barrier, uint32_t x,
                                          uint32_t y, uint32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(&tensor), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void prefetch(const TensorMap& tensor) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&tensor) : "memory");
}
// Between accesses to shared memory by threads and those by tensor cores.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

#endif
