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
// 3. A weight of 0 times a value that is not finite is no number. A row whose result is not finite is
//    computed again, alone, from the keys that it attends to and zeros.

#pragma once
#include "../common/pipeline.cuh"
#include "../common/products_across.cuh"
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
  uint64_t exists[4][4];  // keys of a stage, as four warps have found them
  int64_t starts[kRows], ends[kRows], sequences[kRows];
  uint64_t active, pending, again;
  uint32_t all[2][kWords];  // the masks of a warpgroup's rows together
  uint32_t masks[kRows][kWords];
};

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
  for (int t = 0; t < kTiles; t++) {
    uint32_t x[4] = {};
    if (exists)
      for (int i = 0; i < 4; i++) x[i] = from[t * 64 + 2 * i] | uint32_t(from[t * 64 + 2 * i + 1]) << 16;
    put_16(to + t * kTile, make_uint4(x[0], x[1], x[2], x[3]));
  }
}

template <typename T, int D>
__device__ void run(const Request& r) {
  using M = Memory<D>;
  constexpr int kTerms = Terms<T>::kCount;
  extern __shared__ __align__(16) uint8_t memory[];
  // Rows of matrices are permuted by the lower bits of their address.
  uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  Rest& rest = *reinterpret_cast<Rest*>(memory + (base - start) + M::kRest);
  int tid = threadIdx.x, lane = tid % 32;
  int group = __shfl_sync(~0u, tid / 128, 0), warp = __shfl_sync(~0u, tid / 32, 0);

  int64_t unit = r.first_unit + blockIdx.x;
  int kv_head = static_cast<int>(unit % r.tiles);
  int64_t first_row = unit / r.tiles * r.tile_rows;
  int rows = static_cast<int>(min(int64_t(r.tile_rows), r.rows - first_row));
  int half = (r.tile_rows + 1) / 2;  // rows of a warpgroup

  if (tid < rows) {
    Finder finder(r, first_row + tid, kv_head);
    bool any = finder.keys > 0;
    rest.starts[tid] = finder.start;
    rest.ends[tid] = finder.end;
    rest.sequences[tid] = any ? finder.sequence : kNowhere;
  }
  if (tid == 0) {
    for (int i = 0; i < M::kStages; i++) {
      barrier_init(shared_address(&rest.full[i]), 128 + 4);
      barrier_init(shared_address(&rest.empty[i]), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    rest.pending = rows == 64 ? ~0ull : (1ull << rows) - 1;
    rest.again = 0;
  }

  // Queries, of row / group and head % group.
  const uint16_t* queries = static_cast<const uint16_t*>(r.q) + first_row * r.q_row + kv_head * r.group * r.q_head;
  for (int i = tid; i < 2 * 64 * 8; i += kThreads) {
    int which = i / 512, m = i / 8 % 64, piece = i % 8;
    int row = which * half + m / r.group, head = m % r.group;
    bool exists = m / r.group < half && row < rows;
    const uint16_t* from = exists ? queries + row * r.q_row + head * r.q_head + piece * 8 : queries;
    fetch<M::kTiles>(base + which * M::kTiles * kTile + m * 128 + ((piece ^ (m & 7)) << 4), from, exists,
                     r.aligned & 1);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  fence_async();
  __syncthreads();

  // A consumer's two rows of the matrix.
  int m = warp % 4 * 16 + lane / 4;
  int own[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = group * half + (m + 8 * i) / r.group;
    own[i] = group < 2 && (m + 8 * i) / r.group < half && row < rows ? row : -1;
  }
  int stage = 0;
  uint32_t parity = 0;
  int64_t blocks = (r.length + kKeys - 1) / kKeys;
  constexpr int kNumbers = D / 2;  // of a thread's values

  for (;;) {
    // The rows of this pass: all of one sequence, or one that is computed again.
    if (tid == 0) {
      uint64_t active = 0;
      if (rest.pending) {
        int64_t sequence = rest.sequences[__ffsll(rest.pending) - 1];
        for (int i = 0; i < rows; i++)
          if (rest.pending >> i & 1 && rest.sequences[i] == sequence) active |= 1ull << i;
        rest.pending &= ~active;
      } else if (rest.again) {
        active = 1ull << (__ffsll(rest.again) - 1);
        rest.again &= ~active;
      }
      rest.active = active;
    }
    __syncthreads();
    uint64_t active = rest.active;
    if (active == 0) break;
    bool alone = (active & (active - 1)) == 0;
    int some = __ffsll(active) - 1;
    int64_t sequence = rest.sequences[some];
    int64_t begin = rest.starts[some], end = rest.ends[some];
    for (int i = some + 1; i < rows; i++)
      if (active >> i & 1) {
        begin = min(begin, rest.starts[i]);
        end = max(end, rest.ends[i]);
      }

    float o[kNumbers], max[2], sum[2];
#pragma unroll
    for (int i = 0; i < kNumbers; i++) o[i] = 0.f;
    max[0] = max[1] = minus_infinity();
    sum[0] = sum[1] = 0.f;

    int64_t chunks = sequence < 0 ? 0 : (blocks + 32 * kWords - 1) / (32 * kWords);
    for (int64_t chunk = begin / kKeys / (32 * kWords); chunk < chunks; chunk++) {
      int64_t origin = chunk * 32 * kWords;
      if (origin * kKeys >= end) break;
      int words = static_cast<int>(min((blocks - origin + 31) / 32, int64_t(kWords)));
      for (int i = tid; i < rows * kWords; i += kThreads)
        if (i % kWords < words) rest.masks[i / kWords][i % kWords] = 0;
      __syncthreads();
      int shift = r.block_shift - 6;
      for (int row = warp; row < rows; row += kThreads / 32) {
        if (!(active >> row & 1)) continue;
        Finder finder(r, first_row + row, kv_head);
        int64_t entries = finder.keys >> r.block_shift;
        for (int64_t i = lane; i < entries; i += 32) {
          uint32_t entry = finder.list[i * r.list_entry];
          if (entry == kNone) continue;
          for (int part = 0; part < 1 << shift; part++) {
            int64_t block = (int64_t(entry) << shift) + part;
            int64_t bit = block - origin;
            if (bit >= 0 && bit < 32 * kWords && block * kKeys < finder.end && (block + 1) * kKeys > finder.start)
              atomicOr(&rest.masks[row][bit / 32], 1u << (bit % 32));
          }
        }
      }
      __syncthreads();
      for (int i = tid; i < 2 * kWords; i += kThreads) {
        uint32_t all = 0;
        int which = i / kWords;
        if (i % kWords >= words) continue;
        for (int row = which * half; row < min(rows, (which + 1) * half); row++)
          all |= rest.masks[row][i % kWords];
        rest.all[which][i % kWords] = all;
      }
      __syncthreads();

      if (group == 2) {
        const T* keys = static_cast<const T*>(r.keys.at) + kv_head * r.keys.head;
        const T* values = static_cast<const T*>(r.values.at) + kv_head * r.values.head;
        const T* somewhere = aligned_down(static_cast<const T*>(r.q));
        int piece = lane % 8, sub = lane / 8, own_warp = warp % 4;
        for (int word = 0; word < words; word++) {
          uint32_t bits = rest.all[0][word] | rest.all[1][word];
          while (bits) {
            int64_t block = origin + word * 32 + __ffs(bits) - 1;
            bits &= bits - 1;
            barrier_wait(shared_address(&rest.empty[stage]), parity ^ 1);
            uint32_t to = base + M::kRing + stage * M::kStage;
            uint64_t exists = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
              int key = i * 16 + own_warp * 4 + sub;
              int64_t position = block * kKeys + key;
              if (position < begin || position >= end) position = kNowhere;
              int64_t outer = sequence;
              if (position >= 0 && r.page != 0)
                outer = r.table.get(sequence, uint32_t(position) / uint32_t(r.page));
              int64_t at = Finder::at(r, r.keys, position, outer);
              int64_t value_at = Finder::at(r, r.values, position, outer);
              uint32_t place = to + key * 128 + ((piece ^ (key & 7)) << 4);
              const T* k = at >= 0 ? keys + at + piece * 8 : somewhere;
              const T* v = at >= 0 ? values + value_at + piece * 8 : somewhere;
              fetch<M::kTiles>(place, reinterpret_cast<const uint16_t*>(k), at >= 0, r.aligned & 2);
              fetch<M::kTiles>(place + M::kTiles * kTile, reinterpret_cast<const uint16_t*>(v), at >= 0,
                               r.aligned & 4);
              uint32_t votes = __ballot_sync(~0u, at >= 0);
              uint32_t four = (votes & 1) | (votes >> 7 & 2) | (votes >> 14 & 4) | (votes >> 21 & 8);
              exists |= uint64_t(four) << (i * 16 + own_warp * 4);
            }
            if ((r.aligned & 6) != 6) fence_async();
            if (lane == 0) {
              rest.exists[stage][own_warp] = exists;
              barrier_arrive(shared_address(&rest.full[stage]));
            }
            barrier_arrive_after_copies(shared_address(&rest.full[stage]));
            if (++stage == M::kStages) {
              stage = 0;
              parity ^= 1;
            }
          }
        }
      } else {
        for (int word = 0; word < words; word++) {
          uint32_t bits = rest.all[0][word] | rest.all[1][word];
          uint32_t mine = rest.all[group][word];
          while (bits) {
            int bit = __ffs(bits) - 1;
            bits &= bits - 1;
            barrier_wait(shared_address(&rest.full[stage]), parity);
            if (mine >> bit & 1) {
              fence_async();
              uint32_t k = base + M::kRing + stage * M::kStage;
              uint32_t v = k + M::kTiles * kTile;
              float s[32];
              products_begin();
#pragma unroll
              for (int i = 0; i < 4 * M::kTiles; i++)
                multiply_64<T>(s, operand_in_blocks(base + (group * M::kTiles + i / 4) * kTile + 32 * (i % 4)),
                               operand_in_blocks(k + i / 4 * kTile + 32 * (i % 4)), i > 0);
              products_commit();
              uint64_t exists =
                  rest.exists[stage][0] | rest.exists[stage][1] | rest.exists[stage][2] | rest.exists[stage][3];
              int64_t position = (origin + word * 32 + bit) * kKeys;
              // What each of the two rows sees of the block.
              uint64_t seen[2];
#pragma unroll
              for (int i = 0; i < 2; i++) {
                seen[i] = 0;
                if (own[i] < 0 || !(active >> own[i] & 1) || !(rest.masks[own[i]][word] >> bit & 1)) continue;
                int64_t from = rest.starts[own[i]] - position;
                int64_t past = rest.ends[own[i]] - position;
                uint64_t below = past >= 64 ? ~0ull : past > 0 ? (1ull << past) - 1 : 0;
                uint64_t above = from <= 0 ? ~0ull : from < 64 ? ~0ull << from : 0;
                seen[i] = exists & below & above;
              }
              products_wait_but<0>(s);
              bool whole = __all_sync(~0u, (seen[0] & seen[1]) == ~0ull);
              float both[2] = {max[0], max[1]}, scale[2];
              int column = lane % 4 * 2;
#pragma unroll
              for (int i = 0; i < 32; i++) {
                s[i] *= r.scale;
                if (!whole && !(seen[i / 2 % 2] >> (8 * (i / 4) + column + i % 2) & 1)) s[i] = minus_infinity();
                both[i / 2 % 2] = greater(both[i / 2 % 2], s[i]);
              }
#pragma unroll
              for (int i = 0; i < 2; i++) {
                both[i] = greater(both[i], __shfl_xor_sync(~0u, both[i], 1));
                both[i] = greater(both[i], __shfl_xor_sync(~0u, both[i], 2));
                scale[i] = power(max[i] - reference(both[i]));
                // To a row that has seen nothing, nothing may happen.
                if (both[i] == minus_infinity()) scale[i] = 1.f;
                max[i] = both[i];
                sum[i] *= scale[i];
              }
              if (!__all_sync(~0u, scale[0] == 1.f && scale[1] == 1.f)) {
#pragma unroll
                for (int i = 0; i < kNumbers; i++) o[i] *= scale[i / 2 % 2];
              }
              uint32_t p[kTerms][16];
#pragma unroll
              for (int i = 0; i < 32; i += 2) {
                float from = reference(max[i / 2 % 2]);
                float x = power(s[i] - from), y = power(s[i + 1] - from);
                sum[i / 2 % 2] += x + y;
                p[0][i / 2] = pair<T>(x, y);
                if constexpr (kTerms == 2) p[1][i / 2] = second_term(x, y, p[0][i / 2]);
              }
              products_begin();
#pragma unroll
              for (int i = 0; i < 4 * kTerms; i++) {
                const uint32_t* x = &p[i / 4][4 * (i % 4)];
                multiply_across<T>(o, x[0], x[1], x[2], x[3], operand_in_blocks(v + i % 4 * 2048, kTile));
              }
              products_commit();
              products_wait_but<0>(o);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&rest.empty[stage]));
            if (++stage == M::kStages) {
              stage = 0;
              parity ^= 1;
            }
          }
        }
      }
      __syncthreads();
    }

    if (group < 2) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
        sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        bool exists = own[i] >= 0 && (active >> own[i] & 1);
        int row = exists ? own[i] : 0;
        int head = kv_head * r.group + (m + 8 * i) % r.group;
        Running running;
        running.max = max[i];
        running.sum = sum[i];
        float sink = r.sink && exists ? r.sink[head * r.sink_stride] : 0.f;
        float share = running.share(r.sink != nullptr, sink);
        T* out = static_cast<T*>(r.out) + (first_row + row) * r.out_row + head * r.out_head;
        int quarter = lane % 4;
        bool finite = true;
#pragma unroll
        for (int j = 0; j < D / 8; j += 4) {
          uint32_t x[4], y[4];
#pragma unroll
          for (int t = 0; t < 4; t++) {
            float a = running.finished(o[4 * (j + t) + 2 * i], share);
            float b = running.finished(o[4 * (j + t) + 2 * i + 1], share);
            finite = finite && isfinite(o[4 * (j + t) + 2 * i]) && isfinite(o[4 * (j + t) + 2 * i + 1]);
            x[t] = pair<T>(a, b);
          }
#pragma unroll
          for (int t = 0; t < 4; t++) {
            int to = quarter ^ t;
            uint32_t sent = to == 0 ? x[0] : to == 1 ? x[1] : to == 2 ? x[2] : x[3];
            uint32_t got = __shfl_xor_sync(~0u, sent, t);
#pragma unroll
            for (int u = 0; u < 4; u++)
              if (u == to) y[u] = got;
          }
          T* place = out + 8 * (j + quarter);
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
        if (exists && quarter == 0) r.lse[(first_row + row) * r.lse_row + head * r.lse_head] = running.lse();
        if (exists && !alone && !finite) atomicOr(reinterpret_cast<unsigned long long*>(&rest.again), 1ull << row);
      }
    }
    __syncthreads();
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
