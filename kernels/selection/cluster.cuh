// A thread-block cluster a row: its members send what they collect to the first one's shared memory.
#pragma once

#include <cooperative_groups.h>

#include "../common/cluster.cuh"
#include "select.cuh"

// A cluster's view of one row's selection. Every member makes the same decisions from the same sums.
template <class T>
struct Team {
  const Selector<T>& selector;
  const List received;  // of the leader
  const unsigned rank, blocks;
  State* leader;
  u64* inbox;      // the leader's
  unsigned sent;   // of the own list

  __device__ Team(const Selector<T>& selector, unsigned rank, unsigned blocks)
      : selector(selector), received{(int)selector.capacity()}, rank(rank), blocks(blocks), sent(0) {
    const auto cluster = cooperative_groups::this_cluster();
    leader = cluster.map_shared_rank(&state(), 0);
    inbox = cluster.map_shared_rank(received.at(), 0);
  }

  static __device__ __forceinline__ void sync() { cooperative_groups::this_cluster().sync(); }

  // Sends what the list has beyond what was sent; how many candidates all members have sent. One that
  // has cut its list down, or has too many, counts as more than fit. With a barrier of the cluster.
  __device__ unsigned send(bool reordered) {
    unsigned count = state().count;
    if (count > kSlack) {
      __syncthreads();
      compact(own_list(), count, selector.k());
      count = selector.k();
      if (threadIdx.x == 0) state().count = count;
      reordered |= sent > 0;
    }
    const unsigned fresh = count - min(sent, count);
    if (threadIdx.x == 0) {
      state().sent_at = atomicAdd(&leader->inbox, reordered ? selector.capacity() + 1 : fresh);
      if (selector.request.routes && rank > 0) {
        atomicAdd(&leader->gathered.admitted, state().counters.admitted);
        atomicAdd(&leader->gathered.raised, state().counters.raised);
        atomicAdd(&leader->gathered.read, state().counters.read);
        state().counters = RouteCounters{0, 0, 0, 0};
      }
    }
    __syncthreads();
    const unsigned at = state().sent_at;
    if (!reordered) {
#pragma unroll 4
      for (int i = threadIdx.x; i < fresh; i += kThreads) {
        if (at + i < selector.capacity()) inbox[at + i] = own_list()[sent + i];
      }
    }
    sent = count;
    sync();
    return *(volatile unsigned*)&leader->inbox;
  }

  // After the pass down to the primary cutoff found fewer than K in all.
  __device__ __noinline__ int recover(const Slice& slice, const typename Selector<T>::Proposal& proposal, unsigned* total) {
    const auto more = [&](unsigned low, unsigned high) {
      const unsigned raised = state().counters.raised;
      sync();
      selector.collect(slice, low, high);
      const bool reordered = state().counters.raised != raised;
      // Sending clears the counters.
      __syncthreads();
      *total = send(reordered);
    };
    unsigned low = proposal.primary;
    int route = kPrimary;
    if (selector.request.band && proposal.secondary < low) {
      route = kBand;
      more(proposal.secondary, low);
      low = proposal.secondary;
    }
    if (*total >= selector.k()) return route;
    selector.count_leading(slice, low);
    sync();
#pragma unroll 1
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
      unsigned sum = 0;
#pragma unroll 1
      for (int member = 0; member < blocks; member++) {
        sum += cooperative_groups::this_cluster().map_shared_rank(histogram(), member)[bin];
      }
      buckets()[bin] = sum;
    }
    __syncthreads();
    find_bins(1, selector.k() - *total, 0);
    more(state().found[0].bin << 21, low);
    return kRecovered;
  }

  // The leader's inbox from all lists, of which each fits beside K; how many it holds then.
  __device__ __noinline__ unsigned merge() {
    const auto cluster = cooperative_groups::this_cluster();
    sync();
    unsigned total = 0;
    if (rank == 0) {
#pragma unroll 1
      for (int member = 0; member < blocks; member++) {
        const unsigned count = *(volatile unsigned*)&cluster.map_shared_rank(&state(), member)->count;
        const u64* list = cluster.map_shared_rank(own_list().at(), member);
        if (total + count > selector.capacity()) {
          __syncthreads();
          compact(received, total, selector.k());
          total = selector.k();
        }
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += kThreads) received[total + i] = list[i];
        total += count;
      }
      __syncthreads();
    }
    return total;
  }
};

template <class T>
__device__ void select_cluster(const Request& request) {
  const auto cluster = cooperative_groups::this_cluster();
  const unsigned rank = cluster.block_rank(), blocks = cluster.num_blocks();
  const long long row = blockIdx.x >> log_of(blocks);
  prefetch<T>(request, row, rank, blocks);
  const int start = request.start.of(row, request.width, 0);
  const int end = request.end.of(row, request.width, request.width);
  begin();
  // Before its first word to another a member knows that all have begun.
  cluster.barrier_arrive();
  const Selector<T> selector(request, row, start, end, 2);
  const int length = selector.scores.length;
  if (is_trivial(request, length)) {
    if (rank == 0) selector.put_all();
    return;
  }
  typename Selector<T>::Proposal proposal = {0, 0, {0, 0}};
  const Slice slice(selector.scores, rank, blocks);
  int route = kDirect;
  if (length <= request.capacity) {
    selector.collect(slice, 0, kAllKeys);
  } else {
    Vector<T> held[kDepth];
    selector.load(held, slice, slice.begin + threadIdx.x);
    proposal = selector.propose(selector.sample_size(), [&](auto f) { selector.for_each_sampled(f); });
    selector.template collect_primary<true>(slice, proposal, held);
    if (proposal.primary > kNegInfinityKey && request.stride > 1) route = kPrimary;
  }
  cluster.barrier_wait();

  Team<T> team(selector, rank, blocks);
  unsigned total = team.send(false);
  if (total < request.k && length > request.capacity) route = team.recover(slice, proposal, &total);
  if (total > request.capacity) total = team.merge();
  // The leader's memory is read no more; the others' neither.
  cluster_arrive_relaxed();
  if (rank == 0) selector.finish(team.received, total, route, proposal.leading, false);
  __syncwarp();
  cluster.barrier_wait();
}
