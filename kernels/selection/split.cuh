// Several blocks a row, which leave what they collect in the workspace; the last to arrive finishes.
#pragma once

#include "select.cuh"

// What a block leaves: `SEGMENT_BYTES` in src/selection/plan.rs. `arrived` counts in a row's first
// segment, and is 0 between launches.
struct Segment {
  unsigned count, admitted, raised, read;
  unsigned arrived, unused[kHeader - 5];
  u64 list[kSlack];
};
static_assert(sizeof(Segment) == 64 + 8 * kSlack, "src/selection/plan.rs gives as much");

template <class T>
__device__ void select_split(const Request& request) {
  __shared__ bool last;
  const int blocks = request.blocks, rank = blockIdx.x & (blocks - 1);
  const long long row = blockIdx.x >> log_of(blocks);
  const long long raw_start = request.start.raw(row, 0), raw_end = request.end.raw(row, request.width);
  Opening<T, true> opening(request, row, rank);
  begin();
  const int start = Bound::inside(raw_start, request.width), end = Bound::inside(raw_end, request.width);
  const Selector<T> selector(request, row, start, end, 1);
  if (is_trivial(request, selector.scores.length)) {
    if (rank == 0) selector.put_all();
    return;
  }
  if (selector.fits()) {
    if (rank == 0) selector.apart().select_fitting();
    return;
  }

  if (!opening.early) opening.load(selector, rank);
  const Slice slice(rank, blocks, selector.scores.vectors);
  const typename Selector<T>::Proposal proposal = selector.propose(opening.sampled);
  selector.template collect_primary<true>(slice, proposal, opening.held);
  int route = proposal.primary > kNegInfinityKey && request.stride > 1 ? kPrimary : kDirect;
  unsigned count = state().count;
  if (count > kSlack) {
    compact(own_list(), count, request.k);
    count = request.k;
  }

  Segment* segments = reinterpret_cast<Segment*>(request.workspace) + row * blocks;
  Segment& own = segments[rank];
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kThreads) __stcg(&own.list[i], own_list()[i]);
  if (threadIdx.x == 0) {
    const RouteCounters& counters = state().counters;
    __stcg(reinterpret_cast<uint4*>(&own),
           make_uint4(count, counters.admitted, counters.raised, (unsigned)(counters.read / 16)));
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&segments[0].arrived, 1) == blocks - 1;
    if (last) segments[0].arrived = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;

  // The list is built anew from what all have left.
  unsigned total = 0;
  if (threadIdx.x == 0) state().counters = RouteCounters{0, 0, 0, 0};
#pragma unroll 1
  for (int other = 0; other < blocks; other++) {
    const uint4 header = __ldcg(reinterpret_cast<const uint4*>(&segments[other]));
    if (threadIdx.x == 0) {
      state().counters.admitted += header.y, state().counters.raised += header.z;
      state().counters.read += 16ull * header.w;
    }
    if (total + header.x > request.capacity) {
      __syncthreads();
      compact(own_list(), total, request.k);
      total = request.k;
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < header.x; i += kThreads) own_list()[total + i] = __ldcg(&segments[other].list[i]);
    total += header.x;
  }
  if (threadIdx.x == 0) state().count = total;
  __syncthreads();
  // What the slices lack, this block looks for alone, in all of the row.
  if (total < request.k) route = selector.apart().recover(Slice(0, 1, selector.scores.vectors), proposal);
  selector.finish(own_list(), state().count, route, proposal.leading);
}
