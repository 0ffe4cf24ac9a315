// One block a row.
#pragma once

#include "select.cuh"

// kAlone: the block has a multiprocessor to itself, for few rows.
template <class T, bool kAlone>
__device__ void select_block(const Request& request) {
  const long long row = blockIdx.x;
  const long long raw_start = request.start.raw(row, 0), raw_end = request.end.raw(row, request.width);
  Opening<T, kAlone> opening(request, row, 0);
  begin();
  const int start = Bound::inside(raw_start, request.width), end = Bound::inside(raw_end, request.width);
  const Selector<T> selector(request, row, start, end, 1);
  if (is_trivial(request, selector.scores.length)) return selector.put_all();
  if (selector.fits()) return selector.apart().select_fitting();

  if (!opening.early) opening.load(selector, 0);
  const Slice slice(0, 1, selector.scores.vectors);
  const typename Selector<T>::Proposal proposal = selector.propose(opening.sampled);
  selector.template collect_primary<kAlone>(slice, proposal, opening.held);
  int route = proposal.primary > kNegInfinityKey && request.stride > 1 ? kPrimary : kDirect;
  if (state().count < request.k) route = selector.apart().recover(slice, proposal);
  selector.finish(own_list(), state().count, route, proposal.leading);
}
