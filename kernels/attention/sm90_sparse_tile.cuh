// Attention over blocks of 64 or 128 keys, for compute capability 9.0: keys and values of 64 or 128.
//
// 1. A block of threads takes a tile of neighbouring rows and one key head. It reads every key that
//    any of the rows attends to once, in the order of positions, and multiplies it with all of them;
//    what a row does not attend to has weight 0 there, which changes nothing. So a row's bits do not
//    depend on the tile it is in, and rows that attend to the same blocks share the reads.
// 2. Which blocks of 64 keys a row attends to is a bit mask, made from its list, of 4096 blocks at a
//    time. Four warps gather the blocks of all masks into a ring; two warpgroups have half of the
//    rows each, with all heads of the group: 64 rows of a matrix. A warpgroup passes over blocks that
//    none of its rows attends to.
// 3. A warpgroup asks for the scores of a block before it weighs the values of the one before, so
//    that the tensor cores have work while it turns scores into weights. Where both attend to a block,
//    they ask in turn: else the tensor cores take a little of each, and both wait for all of it.
// 4. Second terms of weights are left out of rows of which many keys share the weight, and their
//    products where no row of a warpgroup has one.
// 5. A weight of 0 times a value that is not finite is no number. A row whose result is not finite is
//    computed again, alone, from the keys that it attends to and zeros. Before that all rows of large
//    scores are, which take care that is of no use to others.

#pragma once
#include "../common/pipeline.cuh"
#include "../common/products_across.cuh"
#include "../common/warp.cuh"
#include "sparse.cuh"

namespace sparse::tile {

constexpr int kThreads = 384;
constexpr int kKeys = 64;    // of a block
constexpr int kRows = 64;    // at most, of a tile
constexpr int kWords = 128;  // of a mask
constexpr int kTile = 8192;  // bytes of 64 rows by 64 columns

template <int D>
struct Memory {
  static constexpr int kTiles = D / 64;
  static constexpr int kStages = 4;
  static constexpr int kStage = 2 * kTiles * kTile;  // keys, then values
  static constexpr int kRing = 2 * kTiles * kTile;   // behind the queries of two warpgroups
  static constexpr int kRest = kRing + kStages * kStage;
};

struct Rest {
  uint64_t full[4], empty[4];
  uint64_t exists[4];     // keys of a stage: 16 bits by each warp that gathers
  uint64_t voted[2];      // whether the warps of a warpgroup have said if second terms count
  uint8_t votes[2][2][4];
  int64_t starts[kRows], ends[kRows], sequences[kRows], entries[kRows];
  uint64_t active, pending, large, again;
  int64_t begin, end;       // what the active rows see together
  uint32_t all[2][kWords];  // the masks of a warpgroup's rows together
  uint32_t repeats;         // whether the active rows are computed again
  uint32_t listed;          // blocks of a chunk that any row attends to
  uint16_t list[32 * kWords];  // and which they are: 12 bits, and two for which warpgroups have such rows
  uint32_t masks[kRows][kWords];
};
static_assert(sizeof(Rest) == 44216, "Kind::shared_bytes() says so");

template <int D>
constexpr int bytes() {
  return Memory<D>::kRest + int(sizeof(Rest)) + 1024;
}

// 16 bytes of each 64 columns of a vector, or zeros. They need not lie at a multiple of 16 bytes.
template <int kTiles>
__device__ inline void fetch(uint32_t to, const uint16_t* from, bool exists, bool aligned) {
  if (aligned) {
    copy_async<0, 0>(to, from, exists);
    if constexpr (kTiles > 1) copy_async<kTile, 128>(to, from, exists);
    return;
  }
  for (int t = 0; t < kTiles; t++) put_16(to + t * kTile, load_singly(from + t * 64, exists));
}

// What all lanes have, so that the compiler knows.
template <typename X>
__device__ inline X uniform(X x) {
  return __shfl_sync(~0u, x, 0);
}

// The work of a block of threads.
struct Tile {
  int64_t first_row;
  int kv_head, rows;
  int half;  // rows of a warpgroup

  __device__ explicit Tile(const Request& r) {
    int64_t unit = r.first_unit + blockIdx.x;
    int64_t tile = quotient(unit, r.tiles);
    kv_head = static_cast<int>(unit - tile * r.tiles);
    first_row = tile * r.tile_rows;
    rows = static_cast<int>(min(int64_t(r.tile_rows), r.rows - first_row));
    half = (r.tile_rows + 1) / 2;
  }
};

// A pass over the keys of some rows.
struct Pass {
  uint64_t active;  // its rows; none when all is done
  bool repeats;     // whether they are computed again
  int64_t sequence, begin, end, blocks, chunks;

  // All rows of one sequence, then those of them that have large scores, or one that is computed again alone. By
  // all threads.
  __device__ Pass(const Request& r, Rest& rest) {
    if (threadIdx.x < 32) {
      int lane = threadIdx.x;
      uint64_t pending = rest.pending, large = rest.large, again = rest.again, chosen = 0;
      if (pending | large) {
        uint64_t left = pending ? pending : large;
        int64_t first = rest.sequences[__ffsll(left) - 1];
        for (int i = 0; i < 2; i++)
          chosen |= uint64_t(__ballot_sync(~0u, rest.sequences[lane + 32 * i] == first)) << (32 * i);
        chosen &= left;
      } else if (again) {
        chosen = again & (0 - again);
      }
      unsigned long long least = ~0ull >> 1, most = 0;
      for (int i = lane; i < kRows; i += 32)
        if (chosen >> i & 1) {
          least = min(least, static_cast<unsigned long long>(rest.starts[i]));
          most = max(most, static_cast<unsigned long long>(rest.ends[i]));
        }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        least = min(least, __shfl_xor_sync(~0u, least, lanes));
        most = max(most, __shfl_xor_sync(~0u, most, lanes));
      }
      __syncwarp();
      if (lane == 0) {
        if (pending)
          rest.pending = pending & ~chosen;
        else if (large)
          rest.large = large & ~chosen;
        else
          rest.again = again & ~chosen;
        rest.active = chosen;
        rest.repeats = pending == 0;
        rest.begin = static_cast<int64_t>(least);
        rest.end = static_cast<int64_t>(most);
      }
    }
    __syncthreads();
    active = uniform(rest.active);
    repeats = uniform(rest.repeats);
    begin = uniform(rest.begin);
    end = uniform(rest.end);
    sequence = active ? uniform(rest.sequences[__ffsll(active) - 1]) : kNowhere;
    blocks = (r.length + kKeys - 1) / kKeys;
    chunks = sequence < 0 ? 0 : (min(blocks, (end + kKeys - 1) / kKeys) + 32 * kWords - 1) / (32 * kWords);
  }
  __device__ int64_t first_chunk() const { return begin / kKeys / (32 * kWords); }
  __device__ int words(int64_t chunk) const {
    return static_cast<int>(min((blocks - chunk * 32 * kWords + 31) / 32, int64_t(kWords)));
  }

  // The masks of a chunk. By all threads.
  __device__ void mark(const Request& r, Rest& rest, const Tile& tile, int64_t chunk) const {
    int tid = threadIdx.x, words = this->words(chunk);
    int64_t origin = chunk * 32 * kWords;
    for (int i = tid; i < tile.rows * kWords; i += kThreads)
      if (i % kWords < words) rest.masks[i / kWords][i % kWords] = 0;
    __syncthreads();
    int shift = r.block_shift - 6;
    // A warp has 32 entries of a row, of some rows at a time, so that loads don't wait for each other.
    constexpr int kAtATime = 4, kWarps = kThreads / 32;
    for (int64_t i = tid % 32; i < r.width; i += 32) {
      for (int first = tid / 32; first < tile.rows; first += kAtATime * kWarps) {
        uint32_t entries[kAtATime];
#pragma unroll
        for (int t = 0; t < kAtATime; t++) {
          int row = first + t * kWarps;
          entries[t] = kNone;
          if (active >> (row % kRows) & 1 && row < tile.rows && i < rest.entries[row])
            entries[t] =
                r.positions[(tile.first_row + row) * r.list_row + tile.kv_head * r.list_head + i * r.list_entry];
        }
#pragma unroll
        for (int t = 0; t < kAtATime; t++) {
          if (entries[t] == kNone) continue;
          int row = first + t * kWarps;
#pragma unroll 1
          for (int part = 0; part < 1 << shift; part++) {
            int64_t block = (int64_t(entries[t]) << shift) + part;
            int64_t bit = block - origin;
            if (bit >= 0 && bit < 32 * kWords && block * kKeys < rest.ends[row] &&
                (block + 1) * kKeys > rest.starts[row])
              atomicOr(&rest.masks[row][bit / 32], 1u << (bit % 32));
          }
        }
      }
    }
    __syncthreads();
    for (int i = tid; i < 2 * kWords; i += kThreads) {
      uint32_t all = 0;
      int which = i / kWords;
      if (i % kWords >= words) continue;
#pragma unroll 8
      for (int row = which * tile.half; row < min(tile.rows, (which + 1) * tile.half); row++)
        all |= rest.masks[row][i % kWords];
      rest.all[which][i % kWords] = all;
    }
    __syncthreads();
    // A word at a time, by each warp some. What lies before them all warps count.
    int lane = tid % 32, own_warp = tid / 32;
    uint32_t before = 0;
#pragma unroll
    for (int first = 0; first < kWords; first += 32) {
      if (first >= words) break;
      uint32_t of_first = 0, of_second = 0;
      if (first + lane < words) {
        of_first = rest.all[0][first + lane];
        of_second = rest.all[1][first + lane];
      }
      uint32_t count = __popc(of_first | of_second), past = inclusive_sum(count);
      for (int i = own_warp; i < 32; i += kThreads / 32) {
        uint32_t x = __shfl_sync(~0u, of_first, i), y = __shfl_sync(~0u, of_second, i);
        uint32_t at = before + __shfl_sync(~0u, past - count, i) + __popc((x | y) & ((1u << lane) - 1));
        if ((x | y) >> lane & 1) {
          uint32_t whose = (x >> lane & 1) | (y >> lane & 1) << 1;
          rest.list[at] = static_cast<uint16_t>((first + i) * 32 + lane | whose << 12);
        }
      }
      before += __shfl_sync(~0u, past, 31);
    }
    if (tid == 0) rest.listed = before;
    // The queries, before the first pass.
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_async();
    __syncthreads();
  }
};

// Sixteen keys and values of a block, of which not all may exist; those that do.
template <typename T, int D>
__device__ __noinline__ uint32_t gather_singly(const Request& r, const Pass& pass, const T* keys, const T* values,
                                               int64_t first, uint32_t to, int own_warp, int lane) {
  constexpr int kTiles = Memory<D>::kTiles;
  const T* somewhere = aligned_down(static_cast<const T*>(r.q));
  // What the pointers have already.
  int before = own_warp * 16 + lane / 8;
  uint32_t exists = 0;
#pragma unroll 1
  for (int i = 0; i < 4; i++) {
    int key = before + 4 * i;
    int64_t position = first + key;
    if (position < pass.begin || position >= pass.end) position = kNowhere;
    int64_t outer = pass.sequence;
    if (position >= 0 && r.page != 0) outer = r.table.get(pass.sequence, uint32_t(position) / uint32_t(r.page));
    int64_t at = Finder::at(r, r.keys, position, outer);
    int64_t value_at = Finder::at(r, r.values, position, outer);
    uint32_t place = to + key * 128 + (((lane % 8) ^ (key & 7)) << 4);
    const T* k = at >= 0 ? keys + at - before * r.keys.token : somewhere;
    const T* v = at >= 0 ? values + value_at - before * r.values.token : somewhere;
    fetch<kTiles>(place, reinterpret_cast<const uint16_t*>(k), at >= 0, r.aligned & 2);
    fetch<kTiles>(place + kTiles * kTile, reinterpret_cast<const uint16_t*>(v), at >= 0, r.aligned & 4);
    uint32_t votes = __ballot_sync(~0u, at >= 0);
    exists |= ((votes & 1) | (votes >> 7 & 2) | (votes >> 14 & 4) | (votes >> 21 & 8)) << 4 * i;
  }
  return exists;
}

// Blocks of keys and values to the ring, by four warps.
template <typename T, int D>
__device__ void gather(const Request& r, uint32_t base, Rest& rest, const Tile& tile, int own_warp, int lane) {
  using M = Memory<D>;
  // A warp has 16 keys of a block, four at a time.
  int piece = lane % 8, key = own_warp * 16 + lane / 8;
  const T* keys = static_cast<const T*>(r.keys.at) + tile.kv_head * r.keys.head + key * r.keys.token + piece * 8;
  const T* values =
      static_cast<const T*>(r.values.at) + tile.kv_head * r.values.head + key * r.values.token + piece * 8;
  uint32_t places[2] = {key * 128u + ((piece ^ (key & 7)) << 4), key * 128u + ((piece ^ (key & 7) ^ 4) << 4)};
  uint32_t ring = base + M::kRing;
  // Whether blocks that all rows may see can be copied as they are.
  bool plain = (r.aligned & 6) == 6 && r.page % kKeys == 0;
  int stage = 0;
  uint32_t parity = 1;
  for (;;) {
    Pass pass(r, rest);
    if (pass.active == 0) {
      // The queries are on their way still.
      asm volatile("cp.async.wait_all;" ::: "memory");
      return;
    }
    for (int64_t chunk = pass.first_chunk(); chunk < pass.chunks; chunk++) {
      pass.mark(r, rest, tile, chunk);
      int listed = static_cast<int>(rest.listed);
      for (int n = 0; n < listed; n++) {
        int64_t block = chunk * 32 * kWords + (rest.list[n] & 0xfff);
        barrier_wait(shared_address(&rest.empty[stage]), parity);
        uint32_t to = ring + stage * M::kStage;
        int64_t position = block * kKeys;
        uint32_t exists = 0xffff;
        bool inside = position >= pass.begin && position + kKeys <= pass.end;
        int64_t outer = pass.sequence;
        if (inside && r.page != 0) outer = r.table.get(pass.sequence, uint32_t(position) / uint32_t(r.page));
        int64_t at = Finder::at(r, r.keys, position, outer);
        if (plain && inside && at >= 0) {
          const T* k = keys + at;
          const T* v = values + Finder::at(r, r.values, position, outer);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            fetch<M::kTiles>(to + 512 * i + places[i % 2], reinterpret_cast<const uint16_t*>(k), true, true);
            fetch<M::kTiles>(to + 512 * i + places[i % 2] + M::kTiles * kTile, reinterpret_cast<const uint16_t*>(v),
                             true, true);
            k += 4 * r.keys.token;
            v += 4 * r.values.token;
          }
        } else {
          exists = gather_singly<T, D>(r, pass, keys, values, position, to, own_warp, lane);
        }
        if (lane == 0) {
          reinterpret_cast<uint16_t*>(&rest.exists[stage])[own_warp] = static_cast<uint16_t>(exists);
          barrier_arrive(shared_address(&rest.full[stage]));
        }
        barrier_arrive_after_fetching(shared_address(&rest.full[stage]), (r.aligned & 6) == 6);
        if (++stage == M::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
      __syncthreads();
    }
    __syncthreads();
  }
}

// What warpgroups do in turn: the one that has waited for its own tells the other.
__device__ inline void wait_for_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ inline void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory"); }

// Rows of a word of each lane become columns, in every four lanes.
__device__ inline void transpose(uint32_t (&x)[4], int lane) {
  bool odd = lane & 1, high = lane & 2;
  uint32_t first = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), second = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
  uint32_t a[2] = {odd ? first : x[0], odd ? x[1] : first}, b[2] = {odd ? second : x[2], odd ? x[3] : second};
  first = __shfl_xor_sync(~0u, high ? a[0] : b[0], 2);
  second = __shfl_xor_sync(~0u, high ? a[1] : b[1], 2);
  x[0] = high ? first : a[0];
  x[1] = high ? second : a[1];
  x[2] = high ? b[0] : first;
  x[3] = high ? b[1] : second;
}

// Half of the rows, by a warpgroup.
struct Half {
  int group, warp, lane;
  int m;         // a thread's two rows of the matrix: this and the one 8 further on
  int own[2];    // which rows of the tile they are of; -1: none
  int heads[2];  // and which heads of the group
  int stage;
  uint32_t parity, ballot;
};

template <typename T, int D, bool kRepeats>
__device__ inline void attend(const Request& r, uint32_t base, Rest& rest, const Tile& tile, const Pass& pass,
                              Half& half) {
  using M = Memory<D>;
  constexpr int kTerms = Terms<T>::kCount;
  constexpr int kNumbers = D / 2;  // of a thread's values
  int group = half.group, lane = half.lane, column = lane % 4 * 2;
  const int(&own)[2] = half.own;
  int& stage = half.stage;
  uint32_t &parity = half.parity, &ballot = half.ballot;
  uint32_t ring = base + M::kRing;

  bool takes_part[2];
  int64_t from[2], past[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    takes_part[i] = own[i] >= 0 && (pass.active >> own[i] & 1);
    from[i] = takes_part[i] ? rest.starts[own[i]] : 0;
    past[i] = takes_part[i] ? rest.ends[own[i]] : 0;
  }
  // Blocks that both rows see whole, if they attend to them.
  int64_t whole_from = (::max(from[0], from[1]) + kKeys - 1) / kKeys;
  int64_t whole_past = min(past[0], past[1]) / kKeys;

  float o[kNumbers], max[2], sum[2], squares[2];
#pragma unroll
  for (int i = 0; i < kNumbers; i++) o[i] = 0.f;
  max[0] = max[1] = minus_infinity();
  sum[0] = sum[1] = squares[0] = squares[1] = 0.f;
  // Large products are rounded before their reference is taken off: else what is left of their rounding would be the
  // greatest one's weight. Rows that have any are computed again.
  constexpr float kLarge = 4096.f;
  float farthest[2] = {0.f, 0.f};
  uint32_t p[kTerms][16] = {};
  uint64_t q = operand_in_blocks(base + group * M::kTiles * kTile);
  bool second = false;  // whether there are second terms, which are 0 otherwise
  int held = -1;        // the stage whose values `p` weighs

  // Whether second terms count for the block that is held.
  auto counted = [&] {
    if constexpr (kTerms == 1) return false;
    barrier_wait(shared_address(&rest.voted[group]), ballot);
    uint32_t votes = *reinterpret_cast<const uint32_t*>(rest.votes[group][ballot]);
    ballot ^= 1;
    return votes != 0;
  };
  auto weigh = [&](bool both) {
    uint64_t v = operand_in_blocks(uniform(ring + held * M::kStage + M::kTiles * kTile), kTile);
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; i++)
      multiply_across<T>(o, p[0][4 * i], p[0][4 * i + 1], p[0][4 * i + 2], p[0][4 * i + 3], further(v, i * 2048));
    if constexpr (kTerms == 2) {
      if (both) {
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
          multiply_across<T>(o, p[1][4 * i], p[1][4 * i + 1], p[1][4 * i + 2], p[1][4 * i + 3], further(v, i * 2048));
      }
    }
  };
  auto release = [&](int which) {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&rest.empty[which]));
  };
  auto finish = [&] {
    if (held < 0) return;
    counted();
    weigh(true);
    products_commit();
    products_wait_but<0>(o);
    release(held);
    held = -1;
  };

  for (int64_t chunk = pass.first_chunk(); chunk < pass.chunks; chunk++) {
    pass.mark(r, rest, tile, chunk);
    int listed = uniform(static_cast<int>(rest.listed)), next = uniform(static_cast<int>(rest.list[0]));
    if (group == 1) give_turn(0);
    for (int n = 0; n < listed; n++) {
      int entry = next, at = entry & 0xfff;
      if (!(entry >> (12 + group) & 1)) {
        // The ring may not get round to what is held.
        finish();
        barrier_wait(shared_address(&rest.full[stage]), parity);
        release(stage);
        next = uniform(static_cast<int>(rest.list[n + 1]));
      } else {
        barrier_wait(shared_address(&rest.full[stage]), parity);
        fence_async();
        float s[32];
        uint64_t k = operand_in_blocks(uniform(ring + stage * M::kStage));
        bool turns = entry >> 12 == 3;
        if (turns) wait_for_turn(group);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4 * M::kTiles; i++)
          multiply_64<T>(s, further(q, i / 4 * kTile + 32 * (i % 4)), further(k, i / 4 * kTile + 32 * (i % 4)),
                         i > 0);
        products_commit();
        // Whether the two rows attend to it.
        bool wanted[2];
#pragma unroll
        for (int i = 0; i < 2; i++) wanted[i] = takes_part[i] && rest.masks[own[i]][at / 32] >> (at % 32) & 1;
        next = uniform(static_cast<int>(rest.list[n + 1]));
        uint64_t exists = rest.exists[stage];
        int64_t block = chunk * 32 * kWords + at;
        bool whole = __all_sync(~0u, exists == ~0ull && wanted[0] && wanted[1] && block >= whole_from &&
                                         block < whole_past);
        // What each of the two rows sees of the block.
        uint64_t seen[2] = {~0ull, ~0ull};
        if (!whole) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            int64_t first = from[i] - block * kKeys, last = past[i] - block * kKeys;
            uint64_t below = last >= 64 ? ~0ull : last > 0 ? (1ull << last) - 1 : 0;
            uint64_t above = first <= 0 ? ~0ull : first < 64 ? ~0ull << first : 0;
            seen[i] = wanted[i] ? exists & below & above : 0;
          }
        }
        if (held >= 0) {
          weigh(uniform(int(counted())));
          products_commit();
          if (turns) give_turn(1 - group);
          products_wait_but<1>(s);
        } else {
          if (turns) give_turn(1 - group);
          products_wait_but<0>(s);
        }
        if (!whole) {
          uint64_t own_columns[2] = {seen[0] >> column, seen[1] >> column};
#pragma unroll
          for (int i = 0; i < 32; i++)
            if (!(own_columns[i / 2 % 2] >> (8 * (i / 4) + i % 2) & 1)) s[i] = minus_infinity();
        }
        float most[4];
        greatest_scores(s, most);
        float scale[2], against[2], added[4] = {0.f, 0.f, 0.f, 0.f}, squared[4] = {0.f, 0.f, 0.f, 0.f};
        bool few[2] = {false, false};
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float now = follow(max[i], greatest_of_row(greater(most[2 * i], most[2 * i + 1])) * r.scale);
          scale[i] = moved(max[i], now);
          max[i] = now;
          against[i] = -reference(max[i]);
          if (!kRepeats) farthest[i] = fmaxf(farthest[i], fabsf(against[i]));
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
          int which = i / 2 % 2;
          if (kRepeats && fabsf(against[which]) > kLarge)
            s[i] = power(__fadd_rn(__fmul_rn(s[i], r.scale), against[which]));
          else
            s[i] = power(__fmaf_rn(s[i], r.scale, against[which]));
          added[i % 4] += s[i];
          if constexpr (kTerms == 2) squared[i % 4] = __fmaf_rn(s[i], s[i], squared[i % 4]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          sum[i] = __fmaf_rn(sum[i], scale[i], sum_of_row(added[2 * i] + added[2 * i + 1]));
          if constexpr (kTerms == 2) {
            float more = sum_of_row(squared[2 * i] + squared[2 * i + 1]);
            squares[i] = __fmaf_rn(squares[i], scale[i] * scale[i], more);
            few[i] = seen[i] != 0 && !are_many(sum[i], squares[i]);
          }
        }
        bool vote = false;
        if constexpr (kTerms == 2) {
          vote = __any_sync(~0u, few[0] || few[1]);
          if (lane == 0) {
            rest.votes[group][ballot][half.warp] = vote;
            barrier_arrive(shared_address(&rest.voted[group]));
          }
        }
        products_wait_but<0>(o);
        if (held >= 0) release(held);
        held = stage;
        if (!__all_sync(~0u, scale[0] == 1.f && scale[1] == 1.f)) {
#pragma unroll
          for (int i = 0; i < kNumbers; i++) o[i] *= scale[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < 32; i += 2) p[0][i / 2] = pair<T>(s[i], s[i + 1]);
        if constexpr (kTerms == 2) {
          if (vote) {
#pragma unroll
            for (int i = 0; i < 32; i += 2)
              p[1][i / 2] = few[i / 2 % 2] ? second_term(s[i], s[i + 1], p[0][i / 2]) : 0;
          } else if (second) {
#pragma unroll
            for (int i = 0; i < 16; i++) p[1][i] = 0;
          }
          second = vote;
        }
      }
      if (++stage == M::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (group == 0) wait_for_turn(0);
    __syncthreads();
  }
  finish();

  bool alone = (pass.active & (pass.active - 1)) == 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    bool exists = takes_part[i];
    int row = exists ? own[i] : 0;
    int head = tile.kv_head * r.group + half.heads[i];
    Running running;
    running.max = max[i];
    running.sum = sum[i];
    float sink = r.sink && exists ? r.sink[head * r.sink_stride] : 0.f;
    float share = running.share(r.sink != nullptr, sink);
    bool empty = max[i] == minus_infinity();
    float unfinite = 0.f;  // unless every number is finite
    uint32_t x[D / 8];
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
      float a = o[4 * j + 2 * i], b = o[4 * j + 2 * i + 1];
      unfinite = __fmaf_rn(a, 0.f, unfinite);
      unfinite = __fmaf_rn(b, 0.f, unfinite);
      // As `finished`.
      x[j] = empty ? 0 : pair<T>(__fmaf_rn(a, share, 0.f), __fmaf_rn(b, share, 0.f));
    }
    T* out = static_cast<T*>(r.out) + (tile.first_row + row) * r.out_row + head * r.out_head + 8 * (lane % 4);
#pragma unroll
    for (int j = 0; j < D / 8; j += 4) {
      uint32_t y[4] = {x[j], x[j + 1], x[j + 2], x[j + 3]};
      transpose(y, lane);
      T* place = out + 8 * j;
      if (exists && (r.aligned & 8)) {
        *reinterpret_cast<uint4*>(place) = make_uint4(y[0], y[1], y[2], y[3]);
      } else if (exists) {
        uint16_t* single = reinterpret_cast<uint16_t*>(place);
#pragma unroll
        for (int t = 0; t < 4; t++) {
          single[2 * t] = static_cast<uint16_t>(y[t]);
          single[2 * t + 1] = static_cast<uint16_t>(y[t] >> 16);
        }
      }
    }
    if (exists && lane % 4 == 0) r.lse[(tile.first_row + row) * r.lse_row + head * r.lse_head] = running.lse();
    auto repeat = [&](uint64_t& rows) { atomicOr(reinterpret_cast<unsigned long long*>(&rows), 1ull << row); };
    if (exists && !kRepeats && farthest[i] > kLarge)
      repeat(rest.large);
    else if (exists && !alone && unfinite != 0.f)
      repeat(rest.again);
  }
  __syncthreads();
}

template <typename T, int D>
__device__ void run(const Request& r) {
  using M = Memory<D>;
  extern __shared__ __align__(16) uint8_t memory[];
  // Rows of matrices are permuted by the lower bits of their address.
  uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  Rest& rest = *reinterpret_cast<Rest*>(memory + (base - start) + M::kRest);
  int tid = threadIdx.x, lane = tid % 32;
  int group = __shfl_sync(~0u, tid / 128, 0), warp = __shfl_sync(~0u, tid / 32 % 4, 0);
  Tile tile(r);

  // Queries, of row / group and head % group. Quotients of numbers below 64 by those up to 64:
  uint32_t inverse = 65536u / r.group + 1;
  auto by_group = [&](int m) { return static_cast<int>(m * inverse >> 16); };
  const uint16_t* queries =
      static_cast<const uint16_t*>(r.q) + tile.first_row * r.q_row + tile.kv_head * r.group * r.q_head;
  for (int i = tid; i < 2 * 64 * 8; i += kThreads) {
    int which = i / 512, m = i / 8 % 64, piece = i % 8;
    int within = by_group(m), row = which * tile.half + within, head = m - within * r.group;
    bool exists = within < tile.half && row < tile.rows;
    const uint16_t* from = exists ? queries + row * r.q_row + head * r.q_head + piece * 8 : queries;
    fetch<M::kTiles>(base + which * M::kTiles * kTile + m * 128 + ((piece ^ (m & 7)) << 4), from, exists,
                     r.aligned & 1);
  }
  if (tid < kRows) {
    Finder finder(r, tile.first_row + min(tid, tile.rows - 1), tile.kv_head);
    rest.starts[tid] = finder.start;
    rest.ends[tid] = finder.end;
    rest.entries[tid] = finder.keys >> r.block_shift;
    rest.sequences[tid] = finder.keys > 0 ? finder.sequence : kNowhere;
  }
  if (tid == 0) {
    for (int i = 0; i < M::kStages; i++) {
      barrier_init(shared_address(&rest.full[i]), 128 + 4);
      barrier_init(shared_address(&rest.empty[i]), 8);
    }
    for (int i = 0; i < 2; i++) barrier_init(shared_address(&rest.voted[i]), 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    rest.pending = tile.rows == 64 ? ~0ull : (1ull << tile.rows) - 1;
    rest.large = rest.again = 0;
  }
  __syncthreads();

  if (group < 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Half half;
    half.group = group;
    half.warp = warp;
    half.lane = lane;
    half.m = warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int m = half.m + 8 * i, within = by_group(m), row = group * tile.half + within;
      half.own[i] = within < tile.half && row < tile.rows ? row : -1;
      half.heads[i] = m - within * r.group;
    }
    half.stage = 0;
    half.parity = half.ballot = 0;
    for (;;) {
      Pass pass(r, rest);
      if (pass.active == 0) break;
      if (pass.repeats)
        attend<T, D, true>(r, base, rest, tile, pass, half);
      else
        attend<T, D, false>(r, base, rest, tile, pass, half);
    }
    // The queries may be on their way still.
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    gather<T, D>(r, base, rest, tile, warp, lane);
  }
}

}  // namespace sparse::tile

#define SPARSE_TILE(T)                                                    \
  extern "C" __global__ void __launch_bounds__(sparse::tile::kThreads, 1) \
      sparse_tile_64(const __grid_constant__ sparse::Request r) {         \
    sparse::tile::run<T, 64>(r);                                          \
  }                                                                       \
  extern "C" __global__ void __launch_bounds__(sparse::tile::kThreads, 1) \
      sparse_tile_128(const __grid_constant__ sparse::Request r) {        \
    sparse::tile::run<T, 128>(r);                                         \
  }
