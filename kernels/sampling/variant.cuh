// What a run of an ablation exchanges in the kernels of sampling (ablation/): the techniques of the paper's
// table 4. Kernels that ship have what is written here.
#pragma once

// The threshold: as proposed; proposed, and taken for one that has missed; none.
enum class Truncates { kProposed, kMisses, kNever };

// The cut: by ranks of the best, then three pivots at a time, or histograms of the row. Or always by three
// pivots at a time, by one, or by a sort: of the candidates, or where they don't hold the set, of the
// row.
enum class Searches { kRanked, kQuaternary, kBinary, kSorted };

struct Variant {
  Truncates truncates = Truncates::kProposed;
  Searches searches = Searches::kRanked;
  // Whether of the elements that have the cut's key only those are kept that the set has room for.
  bool cuts_duplicates = true;
  // Loads in flight of the pass; 0: as many as suit the block.
  int in_flight = 0;
};

// A run's file gives its own, in that order.
#ifndef VARIANT
#define VARIANT
#endif
constexpr Variant kVariant = {VARIANT};

template <class M>
struct Found;

// What the runs search by instead: ablation/alternatives.cuh.
struct Alternatives {
  template <class M, class Key, class Measure>
  static __device__ void halve(int n, unsigned* low, unsigned* high, typename M::Sum* above, typename M::Sum target,
                               Key key_at, Measure measure);
  template <class M, class K>
  static __device__ Found<M> search_row(K& kept, unsigned low, unsigned high, typename M::Sum above,
                                        typename M::Sum target);
  template <class M, class K>
  static __device__ Found<M> search_sorted(K& kept, unsigned high, typename M::Sum above, typename M::Sum target);
  template <class M, class K>
  static __device__ Found<M> search_sorted_row(K& kept, unsigned high, typename M::Sum above,
                                               typename M::Sum target);
};
