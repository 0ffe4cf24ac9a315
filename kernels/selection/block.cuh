// One block a row.
#pragma once

#include "select.cuh"

// kWide: a block that has a multiprocessor to itself, for few rows. It begins with the row's first vectors,
// and where these are all, samples them.
template <class T, bool kWide>
__device__ void select_block(const Request& request) {
  const long long row = blockIdx.x;
  Vector<T> held[kDepth];
  // Where every row starts at 0, its first vectors need not wait for its end.
  const bool early = kWide && request.start.kind == kNone;
  if (early) {
    const Scores<T> whole(static_cast<const T*>(request.scores) + row * request.pitch, 0, request.width);
    if (whole.vectors > 0) whole.load_from(threadIdx.x, whole.vectors, held);
  } else if (kWide) {
    prefetch<T>(request, row, 0, 1);
  }
  const int start = request.start.of(row, request.width, 0);
  const int end = request.end.of(row, request.width, request.width);
  begin();
  const Selector<T> selector(request, row, start, end, 1);
  const int length = selector.scores.length;
  if (is_trivial(request, length)) return selector.put_all();

  const Slice slice(selector.scores, 0, 1);
  int route = kDirect;
  Leading leading = {0, 0};
  bool counted = false;
  if (length <= request.capacity) {
    selector.collect(slice, 0, kAllKeys);
  } else {
    typename Selector<T>::Proposal proposal;
    if (kWide && selector.scores.vectors <= kDepth * kThreads && !request.fixed_stride) {
      if (!early) selector.load(held, slice, threadIdx.x);
      proposal = selector.propose(selector.held_size(), [&](auto f) { selector.for_each_held(held, f); });
    } else {
      if (kWide && !early) selector.load(held, slice, threadIdx.x);
      proposal = selector.propose(selector.sample_size(), [&](auto f) { selector.for_each_sampled(f); });
    }
    leading = proposal.leading;
    counted = selector.template collect_primary<kWide>(slice, proposal, held);
    if (proposal.primary > kNegInfinityKey && request.stride > 1) route = kPrimary;
    if (state().count < request.k) route = selector.recover(slice, proposal);
  }
  selector.finish(own_list(), state().count, route, leading, counted);
}
