// The kept set itself: ids in ascending order, log-probabilities, and its true size. A small set is
// ranked by its ids. For a larger one the row is walked in tiles in the order of ids; a scan gives
// each survivor its place.
#pragma once

#include "truncate.cuh"

// How many there are, of what mass; and none in the places beyond them.
template <class T, int C>
__device__ __forceinline__ void say_size(const Kept<T, C>& kept, unsigned* ids, float* log_probs, unsigned* counts,
                                         long long capacity, unsigned* size, Mass* mass) {
  kept.count_and_mass(size, mass);
  if (threadIdx.x == 0 && Team<C>::rank() == 0) counts[kept.row_index()] = *size;
#pragma unroll 1
  for (long long i = *size + Team<C>::rank() * kThreads + threadIdx.x; i < capacity;
       i += Team<C>::size() * kThreads) {
    ids[i] = ~0u, log_probs[i] = -CUDART_INF_F;
  }
}

// Those of a set that is ranked, in the order of ids.
template <class T, int C>
__device__ __forceinline__ void say_members(const Kept<T, C>& kept, unsigned* ids, float* log_probs, long long capacity,
                                            unsigned size, Mass mass) {
  const double log = log_mass(mass);
  const Top& top = kept.shared.top;
  if (Team<C>::rank() == 0 && threadIdx.x < kTop) {
    // Those before it in the order of ids that are kept.
    const unsigned lane = threadIdx.x % 32;
    unsigned place = 0, mine = 0;
    bool is = false;
#pragma unroll
    for (unsigned i = 0; i < kTop / 32; i++) {
      const unsigned at = i * 32 + lane, entry = top.by_id[at];
      const bool kept_there = at < kept.ranked && entry >> 8 < size;
      const unsigned those = __ballot_sync(~0u, kept_there);
      if (i < threadIdx.x / 32) place += __popc(those);
      if (i == threadIdx.x / 32) place += __popc(those & ((1u << lane) - 1)), mine = entry & 0xff, is = kept_there;
    }
    if (is && place < capacity) {
      const u64 order = top.orders[mine];
      ids[place] = ~(unsigned)order;
      log_probs[place] = kept.softmax.log_weight(value_of(order >> 32), log);
    }
  }
  kept.leave();
}

// All rows whose set is not among the best of the first pass. By itself: it takes no registers from the others.
template <class T, int C>
__device__ __noinline__ void candidates_rest(const Kept<T, C>* of_row, float own_best, float own_sum, int joint,
                                             unsigned* routes, unsigned* ids, float* log_probs, unsigned* counts,
                                             long long capacity) {
  Kept<T, C> kept(*of_row, *reinterpret_cast<Shared<C>*>(dynamic));
  kept.finish(joint, routes, own_best, own_sum);
  if (kept.open) kept.settle_by_pass();
  const auto& row = kept.row;
  unsigned size;
  Mass mass;
  say_size(kept, ids, log_probs, counts, capacity, &size, &mass);
  if (kept.members) {
    say_members(kept, ids, log_probs, capacity, size, mass);
    return;
  }
  const double log = log_mass(mass);

  auto members = [&](const Vector<T>& v, int first) {
    unsigned count = 0;
#pragma unroll
    for (int w = 0; w < Row<T>::kWidth; w++) count += kept.holds(widen(v.at[w]), first + w);
    return count;
  };
  unsigned before = 0, total;
  if constexpr (C > 1) {
    unsigned own = 0;
#pragma unroll 1
    for (int j = row.begin + threadIdx.x; j < row.end; j += kThreads) {
      own += members(row.load(j), row.first(j));
    }
    before = team_exclusive_sum<C>(block_sum<Count>(own), 0u, AddSums(), &total);
  }
  const unsigned wanted = size < capacity ? size : (unsigned)capacity;
#pragma unroll 1
  for (int base = row.begin; base < row.end && before < wanted; base += kThreads) {
    const int j = base + threadIdx.x;
    Vector<T> v;
    unsigned count = 0;
    if (j < row.end) v = row.load(j), count = members(v, row.first(j));
    unsigned place = before + block_exclusive_sum(count, 0u, AddSums(), &total);
    if (count) {
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        const float x = widen(v.at[w]);
        const int id = row.first(j) + w;
        if (kept.holds(x, id)) {
          if (place < wanted) ids[place] = id, log_probs[place] = kept.softmax.log_weight(x, log);
          place++;
        }
      }
    }
    before += total;
  }
  kept.leave();
}

template <class T, int C>
__device__ __forceinline__ void candidates(const Request& request, unsigned* ids, float* log_probs, unsigned* counts,
                                           long long capacity) {
  const Kept<T, C> kept(request, *reinterpret_cast<Shared<C>*>(dynamic), Team<C>::index(), true, [] {});
  ids += kept.row_index() * capacity, log_probs += kept.row_index() * capacity;
  if (!kept.members) {
    candidates_rest(kept.published(), kept.own_best, kept.own_sum, request.joint, request.routes, ids, log_probs, counts,
                    capacity);
    return;
  }
  unsigned size;
  Mass mass;
  say_size(kept, ids, log_probs, counts, capacity, &size, &mass);
  say_members(kept, ids, log_probs, capacity, size, mass);
}
