// The scores on devices of compute capability 9.0: products of warpgroups, of 64 keys with 64 or 128
// columns, both from shared memory.
//
// One warpgroup fetches: queries, weights and bounds of each item into one of two slots, and keys, unit
// after unit, into a ring of stages; keys by tiles of the copy engine, or where they lie as it cannot read
// them, by each thread. The others take every kConsumers-th unit each, and while one of them
// weighs and stores, the tensor cores work for another. A unit is multiplied with all columns of the item,
// kPasses times kColumns of them: the more, the less often keys are read from L2.
#pragma once
#include "indexer.cuh"

namespace wgmma {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kConsumers = 3;
constexpr int kThreads = (kConsumers + 1) * kGroup;
constexpr int kSlots = 2;
// Dynamic shared memory of a block, and what of it is left when the buffers begin at a multiple of 1 KB.
constexpr int kShared = 224 * 1024;
constexpr int kRoom = kShared - 1024;

// An item as the consumers see it.
template <int kAll, int kQueries>
struct Slot {
  alignas(16) float weights[kAll];
  uint32_t lower[kQueries], upper[kQueries];
  uint32_t units, number, position;  // units; the ring's number and the first key of the first
  int32_t first, count;
};

template <class T, int kColumns_, int kHeads_, int kPasses_, int kVectors_>
struct Shape {
  using Element = T;
  static constexpr int kColumns = kColumns_, kHeads = kHeads_, kPasses = kPasses_, kVectors = kVectors_;
  static constexpr int kAll = kColumns * kPasses;   // columns of an item
  static constexpr int kEach = kColumns / kHeads;   // queries of a pass
  static constexpr int kQueries = kEach * kPasses;  // and of an item
  // Blocks of 128 bytes a row. Where the dimension is not known, the most.
  static constexpr int kBlocks = kVectors ? (kVectors + 7) / 8 : int(sizeof(T));
  static constexpr int kPassBytes = kColumns * 128 * kBlocks;
  static constexpr int kQueryBytes = kPassBytes * kPasses;
  static constexpr int kStageBytes = kUnit * 128 * kBlocks;
  using Item = Slot<kAll, kQueries>;
  static constexpr int kLeft = kRoom - 64 - kSlots * (kQueryBytes + int(sizeof(Item)));
  static constexpr int kMost = kLeft / (kStageBytes + int(sizeof(UnitNotes)) + 8 * (kConsumers + 1));
  static constexpr int kStages = kMost < 24 ? kMost : 24;
  static_assert(kStages > kConsumers, "a unit for each consumer, and one ahead");
  struct Buffers {
    char queries[kSlots][kQueryBytes];
    char keys[kStages][kStageBytes];
    UnitNotes notes[kStages];
    Item items[kSlots];
    // One for every consumer of every stage: a barrier tells two phases apart, and a consumer that never
    // waited for the phase before could take that one's end, two phases ago, for its own.
    uint64_t full[kStages * kConsumers], empty[kStages];
    uint64_t item_full[kSlots], item_empty[kSlots];
  };
  static_assert(sizeof(Buffers) <= kRoom, "what the host gives");
};

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// What a thread of the producer has fetched is there with the barrier's phase: its copies by an arrival of their own, what it
// stored by the arrival of its warp. `stored` says whether tensor cores read any of that.
__device__ __forceinline__ void announce(uint32_t barrier, bool stored) {
  barrier_arrive_after_copies(barrier);
  if (stored) fence_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// The producer's side of the slots and of the ring.
template <class S, class Buffers>
struct Producer {
  const Request& r;
  const Share& share;
  Buffers& buffers;
  uint32_t item = 0;           // number of the next item
  uint32_t unit = 0;           // and of the next unit,
  uint32_t stage = 0;          // its stage,
  uint32_t round = 0;          // how often that was in use,
  uint32_t barrier = 0;        // and its barrier

  // Waits for the slot of the next item.
  __device__ __forceinline__ typename S::Item& next_item(uint32_t& full) {
    const uint32_t slot = item % kSlots;
    barrier_wait(shared_address(&buffers.item_empty[slot]), (item / kSlots & 1) ^ 1);
    full = shared_address(&buffers.item_full[slot]);
    ++item;
    return buffers.items[slot];
  }

  // Stores what consumers have to know of an item.
  template <int kFetchers>
  __device__ __forceinline__ void describe_item(int thread, typename S::Item& slot, const Item& item,
                                                uint32_t position, uint32_t units) {
    static_assert(S::kQueries <= kFetchers, "a thread a query");
    fetch_weights<S::kAll, S::kHeads, kFetchers>(r, thread, shared_address(slot.weights), item.first, item.count);
    if (thread < S::kQueries) {
      uint32_t lower = 0, upper = 0;
      if (thread < item.count) clamped_bounds(r.starts, r.ends, item.first + thread, r.length, lower, upper);
      slot.lower[thread] = lower;
      slot.upper[thread] = upper;
    }
    if (thread == 0) {
      slot.units = units;
      slot.number = unit;
      slot.position = position;
      slot.first = item.first;
      slot.count = item.count;
    }
  }

  // Waits for the stage of the next unit.
  __device__ __forceinline__ uint32_t next_unit(uint32_t& full) {
    barrier_wait(shared_address(&buffers.empty[stage]), (round & 1) ^ 1);
    full = shared_address(&buffers.full[barrier]);
    const uint32_t own = stage;
    ++unit;
    if (++stage == S::kStages) stage = 0, ++round;
    if (++barrier == S::kStages * kConsumers) barrier = 0;
    return own;
  }

  // Fetches items and keys, wherever they lie. All threads of the group.
  __device__ __forceinline__ void everything(int thread) {
    uint32_t full;
    for_each_stretch<S::kQueries>(r, share, [&](const Item& item, uint32_t position, uint32_t units) {
      const uint32_t queries = shared_address(buffers.queries[this->item % kSlots]);
      auto& slot = next_item(full);
#pragma unroll 1
      for (int pass = 0; pass < S::kPasses; ++pass)
        fetch_queries<typename S::Element, S::kColumns, S::kHeads, kGroup, S::kVectors>(
            r, thread, queries + pass * S::kPassBytes, item.first + pass * S::kEach, item.count - pass * S::kEach);
      describe_item<kGroup>(thread, slot, item, position, units);
      announce(full, !r.query_vectors);
      for (; units; --units, position += kUnit) {
        const uint32_t stage = next_unit(full);
        fetch_keys<typename S::Element, kGroup, S::kVectors>(r, thread, shared_address(buffers.keys[stage]),
                                                             buffers.notes[stage], item, position);
        announce(full, !r.key_vectors);
      }
    });
    auto& last = next_item(full);
    if (thread == 0) last.units = 0;
    announce(full, false);
  }

  static constexpr uint32_t kAcross = 128 / sizeof(typename S::Element);  // elements of a tile's row
  __device__ __forceinline__ int blocks() const { return S::kVectors ? S::kBlocks : (r.bytes + 127) / 128; }

  // Fetches items, their queries by tiles. One warp. Beyond the heads and the rows that there are a tile is
  // 0, and rows that are not of the item see nothing.
  __device__ __forceinline__ void items_by_tiles(const TensorMap& tensor) {
    const int lane = threadIdx.x % 32;
    uint32_t full;
    for_each_stretch<S::kQueries>(r, share, [&](const Item& item, uint32_t position, uint32_t units) {
      const uint32_t queries = shared_address(buffers.queries[this->item % kSlots]);
      auto& slot = next_item(full);
      describe_item<32>(lane, slot, item, position, units);
      unit += units;
      __syncwarp();
      if (lane == 0) {
        const int passes = (item.count + S::kEach - 1) / S::kEach;
        barrier_arrive_expect(full, passes * blocks() * (S::kColumns * 128));
        for (int pass = 0; pass < passes; ++pass)
          for (int block = 0; block < blocks(); ++block)
            copy_tile(queries + pass * S::kPassBytes + block * (S::kColumns * 128), tensor, full, block * kAcross, 0,
                      item.first + pass * S::kEach);
      }
      barrier_arrive_after_copies(full);
    });
    auto& last = next_item(full);
    if (lane == 0) {
      last.units = 0;
      barrier_arrive_expect(full, 0);
    }
    barrier_arrive_after_copies(full);
  }

  // Fetches keys by tiles, and their scales. One warp.
  __device__ __forceinline__ void keys_by_tiles(const TensorMap& keys, const TensorMap& scales) {
    const int lane = threadIdx.x % 32;
    const int tiles = kUnit / r.tile, ahead = 32 / tiles;
    const uint32_t tile_bytes = r.tile * 128, scale_bytes = r.tile * 4 * r.scale_tiles;
    for_each_stretch<S::kQueries>(r, share, [&](const Item& item, uint32_t position, uint32_t units) {
      for (uint32_t first = 0; first < units; first += ahead) {
        // Every lane knows a tile, of this unit or of one of the next: where it lies, and whether there is
        // one to be read.
        int64_t outer = item.sequence;
        uint32_t token = position + first * kUnit + lane * r.tile;
        const bool wanted = token < item.end && first + lane / tiles < units;
        bool found = wanted;
        if (r.page != 0 && wanted) found = locate(r, item.sequence, token, outer, token);
        const unsigned all_absent = __ballot_sync(~0u, wanted && !found), all_found = __ballot_sync(~0u, found);
        const uint32_t past = min(uint32_t(ahead), units - first);
        for (uint32_t i = 0; i < past; ++i) {
          uint32_t full;
          const uint32_t stage = next_unit(full);
          UnitNotes& notes = buffers.notes[stage];
          const int within = lane - int(i) * tiles;  // number of the lane's tile in the unit
          if (within == 0) {
            const unsigned of_unit = (tiles == 32 ? ~0u : (1u << tiles) - 1) << lane;
            if (r.page != 0) {
              uint64_t present = ~uint64_t(0);
              if (all_absent & of_unit)
                for (int j = 0; j < tiles; ++j)
                  if (all_absent >> (lane + j) & 1)
                    present &= ~((~uint64_t(0) >> (kUnit - r.tile)) << j * r.tile);
              notes.present[0] = uint32_t(present);
              notes.present[1] = uint32_t(present >> 32);
            }
            barrier_arrive_expect(full, __popc(all_found & of_unit) * (blocks() * tile_bytes + scale_bytes));
          }
          __syncwarp();
          if (found && within >= 0 && within < tiles) {
            const uint32_t to = shared_address(buffers.keys[stage]) + within * tile_bytes;
            for (int block = 0; block < blocks(); ++block)
              copy_tile(to + block * (kUnit * 128), keys, full, block * kAcross, token, uint32_t(outer));
            if (r.scale_tiles)
              copy_tile(shared_address(notes.scales) + within * r.tile * 4, scales, full, token, 0, uint32_t(outer));
          }
          if (r.scales != nullptr && !r.scale_tiles) fetch_scales(notes, item, position + (first + i) * kUnit, full);
        }
      }
    });
  }

  __device__ __forceinline__ void fetch_scales(UnitNotes& notes, const Item& item, uint32_t position, uint32_t full) {
#pragma unroll
    for (int i = 0; i < kUnit / 32; ++i) {
      const int row = threadIdx.x % 32 + i * 32;
      const float* from = r.scales;
      bool found = uint32_t(row) < item.end - position;
      if (found) {
        int64_t outer;
        uint32_t token;
        found = locate(r, item.sequence, position + row, outer, token);
        if (found) from += outer * r.scale_outer + token * r.scale_token;
      }
      copy_4(shared_address(&notes.scales[row]), from, found ? 4 : 0);
    }
    barrier_arrive_after_copies(full);
  }
};

// How the copy engine finds queries, keys and scales, where it can.
struct Maps {
  TensorMap queries, keys, scales;
};
static_assert(sizeof(Maps) == 3 * 128, "the host gives as much");

template <class T, int kColumns, int kHeads, int kPasses, int kVectors>
__device__ __forceinline__ void scores(const Request& r, const Maps& maps) {
  using S = Shape<T, kColumns, kHeads, kPasses, kVectors>;
  using Buffers = typename S::Buffers;
  extern __shared__ char shared[];
  Buffers& buffers = *reinterpret_cast<Buffers*>(shared + (-shared_address(shared) & 1023));
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  const bool tiled = r.tile != 0;
  if (threadIdx.x == 0) {
    if (tiled) prefetch(maps.queries), prefetch(maps.keys);
    // By tiles, one thread arrives and expects them; with copies of each lane beside them, these too.
    const uint32_t own = kGroup + kGroup / 32;
    const uint32_t of_units = !tiled ? own : r.scales != nullptr && !r.scale_tiles ? 32 + 1 : 1;
    const uint32_t of_items = tiled ? 32 + 1 : own;
    for (int i = 0; i < S::kStages * kConsumers; ++i) barrier_init(shared_address(&buffers.full[i]), of_units);
    for (int i = 0; i < S::kStages; ++i) barrier_init(shared_address(&buffers.empty[i]), kGroup / 32);
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(shared_address(&buffers.item_full[i]), of_items);
      barrier_init(shared_address(&buffers.item_empty[i]), kConsumers * kGroup / 32);
    }
    fence_async();
  }
  // Its barriers also make the ones above known.
  const Share share = find_share<S::kQueries, kThreads>(r);

  if (group == kConsumers) {
    give_registers<88>();
    Producer<S, Buffers> producer{r, share, buffers};
    if (!tiled)
      producer.everything(thread);
    else if (thread < 32)
      producer.keys_by_tiles(maps.keys, maps.scales);
    else if (thread < 64)
      producer.items_by_tiles(maps.queries);
  } else {
    take_registers<136>();
    const int warp = thread / 32;
    for (uint32_t items = 0;; ++items) {
      const uint32_t at = items % kSlots;
      barrier_wait(shared_address(&buffers.item_full[at]), items / kSlots & 1);
      const auto& slot = buffers.items[at];
      const uint32_t units = slot.units, number = slot.number;
      if (units == 0) break;
      if (!tiled) fence_async();
      const uint64_t queries = operand(shared_address(buffers.queries[at]));
      for (uint32_t unit = (group + kConsumers - number % kConsumers) % kConsumers; unit < units;
           unit += kConsumers) {
        constexpr uint32_t kBarriers = S::kStages * kConsumers;
        const uint32_t stage = (number + unit) % S::kStages;
        const uint32_t position = slot.position + unit * kUnit + warp * 16;
        barrier_wait(shared_address(&buffers.full[(number + unit) % kBarriers]), (number + unit) / kBarriers & 1);
        if (!tiled) fence_async();
        const uint64_t keys = operand(shared_address(buffers.keys[stage]));
        const int passes = (slot.count + S::kEach - 1) / S::kEach;
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
          float products[kColumns / 2];
          products_begin();
          const uint64_t columns = queries + pass * (S::kPassBytes >> 4);
          // The first block of 128 bytes of all rows, then the next.
          if constexpr (kVectors != 0) {
#pragma unroll
            for (int step = 0; step < kVectors / 2; ++step)
              multiply_64<T>(products, keys + step / 4 * (kUnit * 128 >> 4) + step % 4 * 2,
                             columns + step / 4 * (kColumns * 128 >> 4) + step % 4 * 2, step > 0);
          } else {
            const int steps = vectors_of(r.bytes) / 2;
#pragma unroll 1
            for (int step = 0; step < steps; ++step)
              multiply_64<T>(products, keys + step / 4 * (kUnit * 128 >> 4) + step % 4 * 2,
                             columns + step / 4 * (kColumns * 128 >> 4) + step % 4 * 2, step > 0);
          }
          products_commit();
          const Beside<kColumns, kHeads> beside(r, shared_address(slot.weights + pass * kColumns),
                                                buffers.notes[stage], slot.lower + pass * S::kEach,
                                                slot.upper + pass * S::kEach, warp * 16);
          products_wait(products);
          reduce<kColumns, kHeads>(r, products, beside, slot.first + pass * S::kEach, position);
        }
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(shared_address(&buffers.empty[stage]));
      }
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(shared_address(&buffers.item_empty[at]));
    }
  }
}

}  // namespace wgmma

// Kernels for `heads` heads, of `columns` columns a pass, and dimensions of so many vectors of 16 bytes;
// 0 for any.
#define INDEXER_WGMMA(name, T, columns, heads, passes, vectors)    \
  extern "C" __global__ void __launch_bounds__(wgmma::kThreads, 1) \
      indexer_##name##_##heads(const __grid_constant__ Request r,  \
                               const __grid_constant__ wgmma::Maps maps) { \
    wgmma::scores<T, columns, heads, passes, vectors>(r, maps);    \
  }

// Of dimension 128, for few rows of queries a sequence and for many; and of any dimension.
#define INDEXER_WGMMA_FEW(T)                      \
  INDEXER_WGMMA(few, T, 64, 16, 1, 8 * sizeof(T)) \
  INDEXER_WGMMA(few, T, 64, 32, 1, 8 * sizeof(T)) \
  INDEXER_WGMMA(few, T, 64, 64, 1, 8 * sizeof(T))
#define INDEXER_WGMMA_MANY(T)                       \
  INDEXER_WGMMA(many, T, 128, 16, 2, 8 * sizeof(T)) \
  INDEXER_WGMMA(many, T, 128, 32, 2, 8 * sizeof(T)) \
  INDEXER_WGMMA(many, T, 128, 64, 2, 8 * sizeof(T)) \
  INDEXER_WGMMA(many, T, 128, 128, 2, 8 * sizeof(T))
#define INDEXER_WGMMA_ANY(T)           \
  INDEXER_WGMMA(any, T, 128, 16, 1, 0) \
  INDEXER_WGMMA(any, T, 128, 32, 1, 0) \
  INDEXER_WGMMA(any, T, 128, 64, 1, 0) \
  INDEXER_WGMMA(any, T, 128, 128, 1, 0)
