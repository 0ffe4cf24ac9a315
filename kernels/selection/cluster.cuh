// A thread-block cluster a row. Members send what they collect to a part of the first one's shared memory that
// is theirs, as it is found, and have its word that it was enough. Only where it was not, or more than fits,
// does all begin anew, with barriers of the cluster: each waits for everything that is on its way to memory.
#pragma once

#include <cooperative_groups.h>

#include "../common/cluster.cuh"
#include "select.cuh"

// A cluster's view of one row's selection, where barriers part its steps. Every member makes the same decisions from the same sums.
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
    const unsigned secondary = selector.secondary_of(proposal);
    if (selector.request.band && secondary < low) {
      route = kBand;
      more(secondary, low);
      low = secondary;
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

// The selection of a row whose members' lists did not serve, from its proposal on.
template <class T>
__device__ __noinline__ void select_by_barriers(Selector<T> selector, unsigned rank, unsigned blocks,
                                                typename Selector<T>::Proposal proposal) {
  Team<T>::sync();
  if (threadIdx.x == 0) state().count = 0, state().counters = RouteCounters{0, 0, 0, 0};
  clear(buckets());
  __syncthreads();
  const Request& request = selector.request;
  const Slice slice(rank, blocks, selector.scores.vectors);
  Vector<T> held[kDepth];
  selector.template collect_primary<false>(slice, proposal, held);
  int route = proposal.primary > kNegInfinityKey && request.stride > 1 ? kPrimary : kDirect;

  Team<T> team(selector, rank, blocks);
  unsigned total = team.send(false);
  if (total < request.k) route = team.recover(slice, proposal, &total);
  if (total > request.capacity) total = team.merge();
  // The leader's memory is read no more; the others' neither.
  cluster_arrive_relaxed();
  if (rank == 0) selector.finish(team.received, total, route, proposal.leading);
  __syncwarp();
  cooperative_groups::this_cluster().barrier_wait();
}

template <class T>
__device__ void select_cluster(const Request& request) {
  __shared__ Mail collected, told;  // the leader's, and the others'
  __shared__ unsigned counts[16], enough;
  const auto cluster = cooperative_groups::this_cluster();
  const unsigned rank = cluster.block_rank(), blocks = cluster.num_blocks();
  const long long row = blockIdx.x >> log_of(blocks);
  const long long raw_start = request.start.raw(row, 0), raw_end = request.end.raw(row, request.width);
  Opening<T, true> opening(request, row, rank);
  if (threadIdx.x == 0) {
    collected.open(blocks), told.open();
    told.expect(sizeof(enough));
  }
  begin();
  // Before its first word to another a member knows that all have begun.
  cluster_arrive_relaxed();
  const int start = Bound::inside(raw_start, request.width), end = Bound::inside(raw_end, request.width);
  const Selector<T> selector(request, row, start, end, 2);
  if (is_trivial(request, selector.scores.length)) {
    if (rank == 0) selector.put_all();
    return;
  }
  if (selector.fits()) {
    if (rank == 0) selector.apart().select_fitting();
    return;
  }

  if (!opening.early) opening.load(selector, rank);
  const typename Selector<T>::Proposal proposal = selector.propose(opening.sampled);
  __syncwarp();
  cluster.barrier_wait();
  if (proposal.primary <= kNegInfinityKey) return select_by_barriers(selector, rank, blocks, proposal);
  const Slice slice(rank, blocks, selector.scores.vectors);
  selector.template stream<true>(slice, value_of(proposal.primary), opening.held);

  // What each may send. It goes as soon as it is known, and so does how much that is.
  const unsigned room = request.capacity >> log_of(blocks);
  const List inbox = {request.capacity};
  const unsigned count = state().count, sent = min(count, room);
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < sent; i += kThreads) collected.send(inbox.at() + rank * room + i, own_list()[i], 0);
  if (threadIdx.x == 0) {
    collected.send(&counts[rank], count, 0);
    collected.expect_at(0, sent * sizeof(u64) + sizeof(unsigned));
  }
  if (rank > 0) {
    told.wait(0);
    if (!*(volatile unsigned*)&enough) select_by_barriers(selector, rank, blocks, proposal);
    return;
  }

  collected.wait(0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned of_lane = lane < blocks ? *(volatile unsigned*)&counts[lane] : 0;
  const unsigned total = __reduce_add_sync(~0u, of_lane);
  const bool serves = total >= request.k && !__any_sync(~0u, of_lane > room);
  if (threadIdx.x > 0 && threadIdx.x < blocks) told.send(&enough, serves, threadIdx.x);
  if (!serves) return select_by_barriers(selector, rank, blocks, proposal);
  if (threadIdx.x == 0) {
    const unsigned sampled = request.stride > 1 ? selector.sample_size() : selector.scores.length;
    state().counters.read = (u64)sampled * blocks + selector.scores.length;
    state().counters.admitted = total;
  }
  // A few warps for each member's part.
  const int warps = kWarps >> log_of(blocks), member = warp / warps;
  const int first = warp % warps * 32 + lane, n = __shfl_sync(~0u, of_lane, member);
  const List part = {inbox.first + (int)(member * room)};
  bool put = false;
  if (request.stride > 1 && total > request.k) {
    selector.put_route(kPrimary);
    const auto put_from = [&](auto& mine) {
#pragma unroll
      for (int e = 0; e < sizeof(mine) / sizeof(u64); e++) {
        const int i = first + e * 32 * warps;
        mine[e] = i < n ? part[i] : 0;
      }
      return selector.put_leading(mine, proposal.leading);
    };
    // No more of any member: alike in all threads.
    if (__any_sync(~0u, of_lane > kEach * 32 * warps)) {
      u64 mine[2 * kEach];
      put = put_from(mine);
    } else {
      u64 mine[kEach];
      put = put_from(mine);
    }
    if (put) return selector.put_rest(request.k);
  }
  // One list of all.
  const unsigned from = __reduce_add_sync(~0u, lane < member ? of_lane : 0);
#pragma unroll 2
  for (int i = first; i < n; i += 32 * warps) own_list()[from + i] = part[i];
  __syncthreads();
  selector.put_route(request.stride > 1 ? kPrimary : kDirect);
  selector.apart().finish_any(own_list(), total, request.k);
  selector.put_rest(request.k);
}
