// Barriers of a thread-block cluster that order nothing but the arrivals: the other kind waits for all that
// a thread has written, on its way to memory.
#pragma once

__device__ __forceinline__ void cluster_arrive_relaxed() {
  __syncwarp();  // `aligned`: all threads of a warp are to execute it together.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
