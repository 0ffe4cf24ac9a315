// One block a row.
#pragma once

#include "select.cuh"

// kHeld: the block holds the row in its registers, four vectors a thread, and samples it there.
template <class T, bool kHeld>
__device__ void select_block(const Request& request) {
  const long long row = blockIdx.x;
  if constexpr (kHeld) prefetch<T>(request, row, 0, 1);
  const int start = request.start.of(row, request.width, 0);
  const int end = request.end.of(row, request.width, request.width);
  begin();
  const Selector<T> selector(request, row, start, end, 1);
  const int length = selector.scores.length;
  if (is_trivial(request, length)) return selector.put_all();

  const Slice slice(selector.scores, 0, 1);
  int route = kDirect;
  if (length <= request.capacity) {
    selector.collect(slice, 0, kAllKeys);
  } else {
    Vector<T> held[kDepth];
    typename Selector<T>::Proposal proposal;
    if constexpr (kHeld) {
      selector.load(held, slice, threadIdx.x);
      proposal = selector.propose([&](auto f) { return selector.for_each_held(held, f); });
    } else {
      proposal = selector.propose([&](auto f) { return selector.for_each_sampled(f); });
    }
    selector.template collect_primary<kHeld>(slice, proposal.primary, held);
    if (proposal.primary > kNegInfinityKey && request.stride > 1) route = kPrimary;
    if (state().count < request.k) route = selector.recover(slice, proposal);
  }
  selector.finish(own_list(), state().count, route);
}
