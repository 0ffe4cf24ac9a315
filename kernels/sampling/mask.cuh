// Logits with everything outside the kept set at -inf. Survivors keep their bits. In place where
// `out` is the logits: nothing is written before the cut is known. A small set is written over a row
// of -inf, and the row is not read again.
#pragma once

#include "truncate.cuh"

// The slice's part of a set in `shared.top`. A logit's bits follow from its key, but for a zero's, whose sign is looked up:
// in place the members have all read the row, to gather its elements they have waited for each other.
template <class T, int C>
__device__ void fill(const Kept<T, C>& kept, T* out) {
  const auto& row = kept.row;
  const T dropped = from_bits<T>(Bits<T>::kNegInfinity);
  const int from = max(row.first(row.begin), 0), to = min(row.first(row.end), row.size);
  int position = -1;
  T survivor = dropped;
  if (threadIdx.x < kept.members) {
    const u64 order = kept.shared.top.ranked(threadIdx.x);
    const float x = value_of(order >> 32);
    position = (int)~(unsigned)order;
    if (position >= from && position < to) survivor = x == 0.0f ? row.data[position] : narrow<T>(x);
  }
  __syncthreads();
  // By the vectors of the output, which need not start where the row's do.
  const int shift = (int)((size_t)(out + from) % 16 / sizeof(T));
  const int lead = min(to, from + (shift ? Row<T>::kWidth - shift : 0));
  const int vectors = max(to - lead, 0) / Row<T>::kWidth, tail = lead + vectors * Row<T>::kWidth;
  Vector<T> v;
#pragma unroll
  for (int w = 0; w < Row<T>::kWidth; w++) v.at[w] = dropped;
  uint4 raw;
  memcpy(&raw, &v, sizeof(raw));
  uint4* aligned = reinterpret_cast<uint4*>(out + lead);
#pragma unroll 4
  for (int j = threadIdx.x; j < vectors; j += kThreads) __stcs(aligned + j, raw);
  if (from + (int)threadIdx.x < lead) out[from + threadIdx.x] = dropped;
  if (tail + (int)threadIdx.x < to) out[tail + threadIdx.x] = dropped;
  __syncthreads();
  if (position >= from && position < to) out[position] = survivor;
}

// Writes a slice of what is above a bound. Of what equals it those below a position are kept; or, where the cut is still
// open, what lies between two bounds is copied, and noted. And the thread's sum of the weights above, if there is a way to
// sum them.
struct NoWeights {
  static constexpr bool kSums = false;
  struct Sum {};
  __device__ explicit NoWeights(const Softmax&) {}
};
template <class T, int C, class W>
static __device__ __noinline__ Mass write_slice(const typename Kept<T, C>::TeamRow row, const Softmax softmax, T* out,
                                                float low, float high, bool open, unsigned end_of_equal) {
  constexpr int kDepth = W::kSums && sizeof(T) == 2 ? 1 : 2;
  // By what is known without a register.
  Elements* const slice = &reinterpret_cast<Shared<C>*>(dynamic)->slice;
  unsigned* const slots = &Kept<T, C>::left_open().slots;
  const W weights(softmax);
  typename W::Sum sum;
  const bool aligned = (size_t)out % 16 / sizeof(T) == row.shift;
  const T dropped = from_bits<T>(Bits<T>::kNegInfinity);
  const auto note = [&](float x, int position) {
    const unsigned slot = shared_add(slots, 1);
    if (slot < kCandidates) slice->keys[slot] = key_of(x), slice->positions[slot] = position;
  };
  int from, to;
  row.whole_vectors(&from, &to);
  row.template for_each_tile<kDepth>([&](const Vector<T>(&tile)[kDepth], int j) {
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      // Of vectors beyond the row it is not used, and need not be an int.
      const int first = (int)((unsigned)(j + d * kThreads) * Row<T>::kWidth - (unsigned)row.shift);
      Vector<T> v = tile[d];
      bool any = false;
#pragma unroll
      for (int w = 0; w < Row<T>::kWidth; w++) {
        const float x = widen(v.at[w]);
        if constexpr (W::kSums) sum.add(weights.of(x, x > high));
        const bool inside = x >= low && x <= high;
        any |= inside;
        if (!(x > high) && !(inside && (open || (unsigned)(first + w) < end_of_equal))) v.at[w] = dropped;
      }
      if (any && open && j + d * kThreads < to) {
        if constexpr (W::kSums) {
          // No call: what lives through one has few registers.
#pragma unroll
          for (int w = 0; w < Row<T>::kWidth; w++) {
            const float x = widen(v.at[w]);
            if (x >= low && x <= high) note(x, first + w);
          }
        } else {
          Kept<T, C>::note_open(v, first, low, high, slice, slots);
        }
      }
      if (j + d * kThreads >= to) continue;
      if (aligned) {
        uint4 raw;
        memcpy(&raw, &v, sizeof(raw));
        __stcs(reinterpret_cast<uint4*>(out + first), raw);
      } else {
#pragma unroll
        for (int w = 0; w < Row<T>::kWidth; w++) out[first + w] = v.at[w];
      }
    }
  });
  int at;
  if (row.has_edge(&at)) {
    const int first = row.first(at);
#pragma unroll 1
    for (int i = max(first, 0); i < min(first + Row<T>::kWidth, row.size); i++) {
      const float x = widen(row.data[i]);
      if constexpr (W::kSums) sum.add(weights.of(x, x > high));
      const bool inside = x >= low && x <= high;
      if (inside && open) note(x, i);
      const bool stays = x > high || (inside && (open || (unsigned)i < end_of_equal));
      out[i] = stays ? row.data[i] : dropped;
    }
  }
  if constexpr (W::kSums) return sum.mass();
  else return {0, 0};
}

// All rows whose set is not among the best of the first pass. By itself: it takes no registers from the others.
template <class T, int C>
__device__ __noinline__ void mask_rest(const Kept<T, C>* of_row, float own_best, float own_sum, int joint,
                                       unsigned* routes, T* out) {
  Kept<T, C> kept(*of_row, *reinterpret_cast<Shared<C>*>(dynamic));
  kept.finish(joint, routes, own_best, own_sum);
  if (kept.members) {
    fill(kept, out);
    kept.leave();
    return;
  }
  const auto& row = kept.row;
  const bool open = kept.open;
  const float low = open ? kept.left_open().low : greatest_up_to(kept.cut_key);
  const float high = open ? kept.left_open().high : low;
  // In place, no member may still be reading; and none may end while it is read. Where the cut is open, all have read
  // what is not their own before they told each other of the bracket, and wait for each other below.
  if (!open && !(C > 1 && kept.settled())) Team<C>::sync();
  Mass above = {0, 0};
  if (C == 1 && kept.sums_above()) {
    by_exponents(kept.softmax, (row.end - row.begin) / kThreads * Row<T>::kWidth + 2 * Row<T>::kWidth, [&](auto way) {
      above = write_slice<T, C, Weights<way.kWay>>(row, kept.softmax, out, low, high, open, kept.cut_end);
    });
  } else {
    write_slice<T, C, NoWeights>(row, kept.softmax, out, low, high, open, kept.cut_end);
  }
  if (!open) return;
  // What turns out not to be kept is overwritten.
  kept.settle(above);
  const int from = row.first(row.begin), to = row.first(row.end);
#pragma unroll 1
  for (int i = threadIdx.x; i < kept.gathered; i += kThreads) {
    const int position = (int)kept.shared.gathered.positions[i];
    if (position < from || position >= to) continue;
    if (!kept.holds(value_of(kept.shared.gathered.keys[i]), position)) {
      out[position] = from_bits<T>(Bits<T>::kNegInfinity);
    }
  }
}

template <class T, int C>
__device__ __forceinline__ void mask(const Request& request, T* out, long long out_stride) {
  const Kept<T, C> kept(request, *reinterpret_cast<Shared<C>*>(dynamic), Team<C>::index(), false, [] {});
  out += kept.row_index() * out_stride;
  if (!kept.members) {
    mask_rest(kept.published(), kept.own_best, kept.own_sum, request.joint, request.routes, out);
    return;
  }
  fill(kept, out);
  kept.leave();
}
