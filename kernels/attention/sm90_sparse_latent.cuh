// Multi-head latent attention over positions, for compute capability 9.0: one key head, keys of 512
// or 576 numbers, whose first 512 are the values.
//
// 1. A block has 64 heads and takes its keys in pairs of blocks of 64. The pair lies in shared memory
//    once, for scores and for values. One block a multiprocessor, which walks over the work.
// 2. Two warpgroups multiply. The first has the scores of even blocks and the left half of the
//    output's columns, the second those of odd blocks and the right half. Each needs the weights of
//    both: its own come from registers, the other's through shared memory.
// 3. They take turns: the first's maximum goes to the second, whose scores were computed meanwhile,
//    and comes back as the pair's. Weights that went before are scaled to it.
// 4. Second terms of weights are left out of rows of which many keys share the weight, and their
//    products where no row of a block has one.
// 5. Four warps gather, by asynchronous copies of 16 bytes: two for each block of the pair, a half of
//    the columns at a time, as soon as the half is free.
// 6. At the end of a segment that is not the last, the block adds its values to what it has so far,
//    which lies in its slot of the workspace.

#pragma once
#include "../common/pipeline.cuh"
#include "../common/products_across.cuh"
#include "sparse.cuh"

namespace sparse::latent {

constexpr int kThreads = 384;
constexpr int kPair = 128;   // keys of a pair of blocks
constexpr int kTile = 8192;  // bytes of 64 rows by 64 columns
constexpr int kLeft = 4;     // tiles of the left half

template <int kKeyDim>
struct Memory {
  static constexpr int kTiles = kKeyDim / 64;
  static constexpr int kKeys = kTiles * kTile;
  static constexpr int kBlock = kTiles * kTile;
  static constexpr int kOwn = kKeys + 2 * kBlock;  // tiles for weights alone
  // Weights for the other warpgroup, both terms, lie in tiles that nothing reads any more: the last
  // of a block of long keys has no values and is done with the scores, and the even block's left
  // half with the first warpgroup's product.
  static constexpr bool kLong = kTiles > 8;
  __host__ __device__ static constexpr int weights(int odd, int term) {
    if (odd) return term == 0 ? kOwn : kLong ? kKeys + kBlock + 8 * kTile : kOwn + kTile;
    return kLong ? kKeys + (term == 0 ? 8 : 3) * kTile : kOwn + (2 + term) * kTile;
  }
  static constexpr int kRest = kOwn + (kLong ? 1 : 4) * kTile;
  static constexpr int kBytes = kRest + 2048;
  // The tiles of a block are gathered and freed in two parts. The first warpgroup frees part 0, with
  // its half of the columns, and the second part 1; and each what it has read weights from.
  __host__ __device__ static constexpr uint32_t part(int odd, int which) {
    if (odd) return which == 1 ? 0x0f0 : kLong ? 0x10f : 0x00f;
    return which == 1 ? (kLong ? 0x1f8 : 0x0f0) : kLong ? 0x007 : 0x00f;
  }
};

struct Rest {
  uint64_t ready[2][2];  // of a block, of a half: gathered
  uint64_t free[2][2];   // no longer read
  uint64_t known[2];     // which keys of a block exist
  uint32_t exists[2][2];
  float max[64];
  float sums[2][64];
  uint32_t rough[2];     // whether weights of a block have second terms
  uint64_t voted[2];     // whether the warps of a warpgroup have said so
  uint8_t votes[2][2][4];
};
static_assert(sizeof(Rest) <= 1024, "Memory::kBytes has as much, and as much again to align it");

// Meetings of the two warpgroups.
enum Meeting { kEvenMax = 1, kOddMax, kEvenThere, kOddThere, kBoth };
__device__ inline void meet(int meeting) { asm volatile("bar.sync %0, 256;" ::"r"(meeting) : "memory"); }
__device__ inline void tell(int meeting) { asm volatile("bar.arrive %0, 256;" ::"r"(meeting) : "memory"); }

// The tiles of a part of a key, eight numbers of each, to shared memory, or zeros.
template <uint32_t kPart, int kTiles, int T = 0>
__device__ inline void fetch(uint32_t to, const void* from, bool exists, uint64_t policy) {
  if constexpr (T < kTiles) {
    if constexpr (kPart >> T & 1)
      asm volatile(
          "{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\n"
          "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0 + %4], [%1 + %5], 16, p, %3;"
          "\n}" ::"r"(to),
          "l"(from), "r"(int(exists)), "l"(policy), "n"(T * kTile), "n"(T * 128)
          : "memory");
    fetch<kPart, kTiles, T + 1>(to, from, exists, policy);
  }
}
// The same where keys don't lie at multiples of 16 bytes.
template <uint32_t kPart, int kTiles>
__device__ inline void fetch_singly(uint32_t to, const uint16_t* from, bool exists) {
  for (int t = 0; t < kTiles; t++) {
    if (!(kPart >> t & 1)) continue;
    put_16(to + t * kTile, load_singly(from + t * 64, exists));
  }
}

// Part of the launch's work: a unit, and the segments of it.
struct Job {
  int64_t local;
  int first, past;

  __device__ Job(const Request& r, int64_t job) {
    local = r.split ? job / r.segments : job;
    first = r.split ? static_cast<int>(job % r.segments) : 0;
    past = r.split ? first + 1 : r.segments;
  }
  __device__ static int64_t count(const Request& r) { return int64_t(r.units) * (r.split ? r.segments : 1); }
  __device__ int pairs(const Request& r, const Finder& finder) const {
    int64_t begin = first * r.segment, end = min(past * r.segment, finder.keys);
    return end > begin ? static_cast<int>((end - begin + kPair - 1) / kPair) : 0;
  }
};

// A part of 32 keys, which begin where the lanes say.
template <typename T, uint32_t kPart, int kTiles>
__device__ inline void gather_part(const T* keys, const T* somewhere, int64_t at, uint32_t to, bool aligned,
                                   uint64_t policy, int lane) {
  int piece = lane % 8, sub = lane / 8;
  if (aligned) {
    // Unrolled, this would push the consumers' code out of the instruction cache.
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      int row = i * 4 + sub;
      int64_t offset = __shfl_sync(~0u, at, row);
      uint32_t place = to + row * 128 + ((piece ^ (row & 7)) << 4);
      fetch<kPart, kTiles>(place, offset >= 0 ? keys + offset : somewhere, offset >= 0, policy);
    }
  } else {
    for (int i = 0; i < 8; i++) {
      int row = i * 4 + sub;
      int64_t offset = __shfl_sync(~0u, at, row);
      uint32_t place = to + row * 128 + ((piece ^ (row & 7)) << 4);
      fetch_singly<kPart, kTiles>(place, reinterpret_cast<const uint16_t*>(keys + offset), offset >= 0);
    }
  }
}

// Two warps for each block of the pair.
template <typename T, int kKeyDim, int kWhich>
__device__ void gather(const Request& r, uint32_t base, Rest& rest, int half, int lane) {
  using M = Memory<kKeyDim>;
  uint32_t to = base + M::kKeys + kWhich * M::kBlock + half * 32 * 128;
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  bool aligned = r.aligned & 2;
  uint32_t parity = 1;
  for (int64_t job = blockIdx.x; job < Job::count(r); job += gridDim.x) {
    Job work(r, job);
    Unit unit(r, r.first_unit + work.local);
    Finder finder(r, unit.row, unit.kv_head);
    const T* keys = static_cast<const T*>(r.keys.at) + unit.kv_head * r.keys.head + lane % 8 * 8;
    const T* somewhere = aligned_down(static_cast<const T*>(r.q));
    int pairs = work.pairs(r, finder);
    int64_t number = work.first * r.segment + kWhich * 64 + half * 32 + lane;
    uint32_t entry = finder.entry(r, number);
    for (int n = 0; n < pairs; n++) {
      int64_t position = finder.position(r, number, entry);
      int64_t at = Finder::at(r, r.keys, position, finder.outer(r, position));
      number += kPair;
      entry = finder.entry(r, number);
      uint32_t exists = __ballot_sync(~0u, at >= 0);
      // Even blocks begin with what is needed first, odd ones with what is freed first.
      constexpr int kFirst = kWhich, kSecond = 1 - kWhich;
      barrier_wait(shared_address(&rest.free[kWhich][kFirst]), parity);
      if (lane == 0) {
        rest.exists[kWhich][half] = exists;
        barrier_arrive(shared_address(&rest.known[kWhich]));
      }
      gather_part<T, M::part(kWhich, kFirst), M::kTiles>(keys, somewhere, at, to, aligned, policy, lane);
      barrier_arrive_after_fetching(shared_address(&rest.ready[kWhich][kFirst]), aligned);
      barrier_wait(shared_address(&rest.free[kWhich][kSecond]), parity);
      gather_part<T, M::part(kWhich, kSecond), M::kTiles>(keys, somewhere, at, to, aligned, policy, lane);
      barrier_arrive_after_fetching(shared_address(&rest.ready[kWhich][kSecond]), aligned);
      parity ^= 1;
    }
  }
}

// The scores of a block that a row doesn't see, out of the way.
__device__ inline void mask(float (&s)[32], const uint32_t (&exists)[2], int lane) {
  if ((exists[0] & exists[1]) == ~0u) return;
  int column = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    uint32_t word = exists[j / 4] >> (8 * (j % 4) + column);
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (!(word >> (e % 2) & 1)) s[4 * j + e] = minus_infinity();
  }
}

__device__ inline void scale_values(float (&o)[128], const float (&scale)[2]) {
  // To multiply by 1 changes nothing, and maxima soon don't move.
  if (__all_sync(~0u, scale[0] == 1.f && scale[1] == 1.f)) return;
#pragma unroll
  for (int i = 0; i < 128; i++) o[i] *= scale[i / 2 % 2];
}

// A pair of weights, of all terms, times what its row has been scaled by since. A second term that was
// left out stays so.
template <typename T, int kTerms>
__device__ inline void scale_weights(uint32_t (&p)[kTerms][16], int i, float scale, bool few) {
  float x, y;
  if constexpr (kTerms == 2) {
    x = __uint_as_float(p[0][i] << 16) + __uint_as_float(p[1][i] << 16);
    y = __uint_as_float(p[0][i] & 0xffff0000u) + __uint_as_float(p[1][i] & 0xffff0000u);
  } else {
    float2 two = __half22float2(*reinterpret_cast<const __half2*>(&p[0][i]));
    x = two.x;
    y = two.y;
  }
  x *= scale;
  y *= scale;
  p[0][i] = pair<T>(x, y);
  if constexpr (kTerms == 2) p[1][i] = few ? second_term(x, y, p[0][i]) : 0;
}

// The weights of a warp's 16 heads to shared memory.
__device__ inline void store_weights(uint32_t to, const uint32_t (&p)[16], int warp, int lane) {
  int row = warp * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint32_t place = to + row * 128 + (((2 * k + lane / 16) ^ (row & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(p[4 * k]),
                 "r"(p[4 * k + 1]), "r"(p[4 * k + 2]), "r"(p[4 * k + 3])
                 : "memory");
  }
  fence_async();
}

// What a thread has so far of the values lies in its slot, four numbers of it at every 256th place.
// Nobody else reads or writes them.
__device__ inline float4 load_slot(const float4* at) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
__device__ inline void store_slot(float4* at, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}

// The values of a segment, as they are to be added to those of others.
__device__ inline void scale_segment(float (&o)[128], const float (&other)[2], const bool (&more)[2]) {
  if (!__all_sync(~0u, more[0] && more[1])) {
#pragma unroll
    for (int i = 0; i < 128; i++)
      if (!more[i / 2 % 2]) o[i] = 0.f;
  }
  if (!__all_sync(~0u, other[0] == 1.f && other[1] == 1.f)) {
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = Running::added(o[i], other[i / 2 % 2]);
  }
}

// Adds a segment to the slot, or is the first there. It needs no answer.
template <bool kFirst>
__device__ inline void add_to_slot(const float (&o)[128], float4* slot) {
#pragma unroll
  for (int j = 0; j < 128; j += 4) {
    float4 x = make_float4(o[j], o[j + 1], o[j + 2], o[j + 3]);
    if (kFirst)
      store_slot(slot + 64 * j, x);
    else
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(slot + 64 * j), "f"(x.x),
                   "f"(x.y), "f"(x.z), "f"(x.w)
                   : "memory");
  }
}

// The same where what the slot has is to be scaled, and for the last segment, which stays here.
template <bool kLast>
__device__ inline void merge_slot(float (&o)[128], float4* slot, const float (&own)[2]) {
  constexpr int kAtATime = kLast ? 4 : 2;  // as registers allow
#pragma unroll
  for (int j = 0; j < 32; j += kAtATime) {
    float4 run[kAtATime];
    __syncwarp();  // The compiler would load all of it first, and has no registers for it.
#pragma unroll
    for (int t = 0; t < kAtATime; t++) run[t] = load_slot(slot + 256 * (j + t));
#pragma unroll
    for (int t = 0; t < kAtATime; t++) {
      float* x = &o[4 * (j + t)];
      x[0] = Running::merged(run[t].x, own[0], x[0], 1.f);
      x[1] = Running::merged(run[t].y, own[0], x[1], 1.f);
      x[2] = Running::merged(run[t].z, own[1], x[2], 1.f);
      x[3] = Running::merged(run[t].w, own[1], x[3], 1.f);
      if (!kLast) store_slot(slot + 256 * (j + t), make_float4(x[0], x[1], x[2], x[3]));
    }
  }
}

// Output numbers of two rows. In short code, which is in no cache when it is needed.
template <typename T>
__device__ inline void store_values(float (&o)[128], T* const (&out)[2], const float (&share)[2],
                                    const Running (&running)[2], bool aligned) {
#pragma unroll
  for (int i = 0; i < 128; i++) o[i] = __fmaf_rn(o[i], share[i / 2 % 2], 0.f);
  if (__any_sync(~0u, running[0].max == minus_infinity() || running[1].max == minus_infinity())) {
    // A share of nothing is no number.
#pragma unroll
    for (int i = 0; i < 128; i++)
      if (running[i / 2 % 2].max == minus_infinity()) o[i] = 0.f;
  }
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 32; j++)
        if (out[i]) *reinterpret_cast<uint32_t*>(out[i] + 8 * j) = pair<T>(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 32; j++)
        if (out[i]) {
          out[i][8 * j] = narrow<T>(o[4 * j + 2 * i]);
          out[i][8 * j + 1] = narrow<T>(o[4 * j + 2 * i + 1]);
        }
  }
}

// The second warpgroup, or the first.
template <typename T, int kKeyDim, bool kOdd>
__device__ void attend(const Request& r, uint32_t base, Rest& rest, int tid) {
  using M = Memory<kKeyDim>;
  constexpr int kOwn = kOdd, kOther = !kOdd, kSide = kOdd;
  int warp = tid / 32, lane = tid % 32;
  int row = warp * 16 + lane / 4;  // and the one 8 further on
  uint32_t own_block = base + M::kKeys + kOwn * M::kBlock;
  // Of the own half of the columns:
  uint32_t own_values = own_block + kSide * kLeft * kTile;
  uint32_t other_values = base + M::kKeys + kOther * M::kBlock + kSide * kLeft * kTile;
  constexpr int kTerms = Terms<T>::kCount;
  int segment_pairs = static_cast<int>(r.segment / kPair);
  uint32_t parity = 0, ballot = 0;

  float o[128], s[32];
  auto side_scores = [&](int side, int add) {
    barrier_wait(shared_address(&rest.ready[kOwn][side]), parity);
    fence_async();
    products_begin();
#pragma unroll
    for (int t = 0; t < M::kTiles; t++)
#pragma unroll
      for (int k = 0; k < (M::part(kOwn, side) >> t & 1 ? 4 : 0); k++) {
        multiply_64<T>(s, operand_in_blocks(base + t * kTile + 32 * k),
                       operand_in_blocks(own_block + t * kTile + 32 * k), add);
        add = 1;
      }
    products_commit();
  };
  auto free = [&](int which) {
    if (lane == 0) barrier_arrive(shared_address(&rest.free[which][kSide]));
  };

  for (int64_t job = blockIdx.x; job < Job::count(r); job += gridDim.x) {
    Job work(r, job);
    Unit unit(r, r.first_unit + work.local);
    int pairs = __shfl_sync(~0u, work.pairs(r, Finder(r, unit.row, unit.kv_head)), 0);

    const T* queries = static_cast<const T*>(r.q) + unit.row * r.q_row + unit.first_head * r.q_head;
    for (int i = tid + 128 * kOdd; i < 64 * M::kTiles * 8; i += 256) {
      int head = i / (M::kTiles * 8), piece = i % (M::kTiles * 8);
      bool exists = head < unit.heads;
      const T* from = exists ? queries + head * r.q_head + piece * 8 : queries;
      uint32_t to = base + piece / 8 * kTile + head * 128 + ((piece % 8 ^ (head & 7)) << 4);
      if (r.aligned & 1)
        copy_async<0, 0>(to, from, exists);
      else
        fetch_singly<1, 1>(to, reinterpret_cast<const uint16_t*>(from), exists);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_async();
    meet(kBoth);

    Running running[2];
    float max[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.f, 0.f}, squares[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] = 0.f;
    if (!kOdd && pairs > 0) {
      side_scores(0, 0);
      side_scores(1, 1);
      products_wait_but<0>(s);
    }
    for (int n = 0; n < pairs; n++) {
      if (kOdd) {
        side_scores(1, 0);
        side_scores(0, 1);
        products_wait_but<0>(s);
      }
      barrier_wait(shared_address(&rest.known[kOwn]), parity);
      uint32_t exists[2] = {rest.exists[kOwn][0], rest.exists[kOwn][1]};
      float both[2], scale[2];
#pragma unroll
      for (int i = 0; i < 32; i++) s[i] *= r.scale;
      mask(s, exists, lane);
      float most[4];
      greatest_scores(s, most);
#pragma unroll
      for (int i = 0; i < 2; i++) both[i] = greatest_of_row(greater(most[2 * i], most[2 * i + 1]));
      if (kOdd) meet(kEvenMax);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float now = follow(kOdd ? rest.max[row + 8 * i] : max[i], both[i]);
        scale[i] = moved(max[i], now);
        max[i] = now;
      }
      __syncwarp();
      if (lane % 4 == 0) {
        rest.max[row] = max[0];
        rest.max[row + 8] = max[1];
      }
      if (kOdd) tell(kOddMax);
      scale_values(o, scale);
      uint32_t p[kTerms][16];
      float added[4] = {0.f, 0.f, 0.f, 0.f}, squared[4] = {0.f, 0.f, 0.f, 0.f};
      float against[2] = {reference(max[0]), reference(max[1])};
#pragma unroll
      for (int i = 0; i < 32; i++) {
        s[i] = power(s[i] - against[i / 2 % 2]);
        added[i % 4] += s[i];
        if constexpr (kTerms == 2) squared[i % 4] = __fmaf_rn(s[i], s[i], squared[i % 4]);
        if (i % 2 == 1) p[0][i / 2] = pair<T>(s[i - 1], s[i]);
      }
      if (!kOdd) tell(kEvenMax);
      bool few[2] = {false, false};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        sum[i] = __fmaf_rn(sum[i], scale[i], sum_of_row(added[2 * i] + added[2 * i + 1]));
        if constexpr (kTerms == 2) {
          float more = sum_of_row(squared[2 * i] + squared[2 * i + 1]);
          squares[i] = __fmaf_rn(squares[i], scale[i] * scale[i], more);
          few[i] = !are_many(sum[i], squares[i]);
        }
      }
      // Second terms, if any row of the block has one.
      bool rough = false;
      if constexpr (kTerms == 2) {
        bool vote = __any_sync(~0u, few[0] || few[1]);
#pragma unroll
        for (int i = 0; i < 16; i++) p[1][i] = 0;
        if (vote) {
#pragma unroll
          for (int i = 0; i < 32; i += 2)
            if (few[i / 2 % 2]) p[1][i / 2] = second_term(s[i], s[i + 1], p[0][i / 2]);
        }
        if (lane == 0) {
          rest.votes[kOdd][ballot][warp] = vote;
          barrier_arrive(shared_address(&rest.voted[kOdd]));
        }
        barrier_wait(shared_address(&rest.voted[kOdd]), ballot);
        uint32_t votes = *reinterpret_cast<const uint32_t*>(rest.votes[kOdd][ballot]);
        ballot ^= 1;
        rough = __shfl_sync(~0u, votes, 0) != 0;
        if (tid == 0) rest.rough[kOdd] = rough;
      }

      // The own weights, by registers.
      auto weigh_own = [&](int term) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t* x = &p[term][4 * i];
          multiply_across<T>(o, x[0], x[1], x[2], x[3], operand_in_blocks(own_values + i * 2048, kTile));
        }
      };
      // Those of the other warpgroup.
      auto weigh_other = [&](int term) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          multiply_across<T>(o, operand_in_blocks(base + M::weights(kOther, term) + 32 * i),
                             operand_in_blocks(other_values + i * 2048, kTile));
      };
      products_begin();
      weigh_own(0);
      if constexpr (kTerms == 2) {
        if (rough) {
          products_begin();
          weigh_own(1);
        }
      }
      products_commit();
      if (kOdd) {
        store_weights(base + M::weights(1, 0), p[0], warp, lane);
        if constexpr (kTerms == 2) {
          if (rough) store_weights(base + M::weights(1, 1), p[1], warp, lane);
        }
        tell(kOddThere);
        meet(kEvenThere);
        bool other_rough = kTerms == 2 && __shfl_sync(~0u, rest.rough[0], 0);
        products_begin();
        weigh_other(0);
        if constexpr (kTerms == 2) {
          if (other_rough) {
            products_begin();
            weigh_other(1);
          }
        }
        products_commit();
        products_wait_but<1>();
        free(kOwn);
        products_wait_but<0>(o);
        free(kOther);
        parity ^= 1;
      } else {
        products_wait_but<0>(o);
        free(kOwn);
        meet(kOddMax);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float pair_max = rest.max[row + 8 * i];
          scale[i] = moved(max[i], pair_max);
          max[i] = pair_max;
          sum[i] *= scale[i];
          squares[i] *= scale[i] * scale[i];
        }
        if (!__all_sync(~0u, scale[0] == 1.f && scale[1] == 1.f)) {
#pragma unroll
          for (int i = 0; i < 16; i++) scale_weights<T>(p, i, scale[i % 2], few[i % 2]);
        }
        store_weights(base + M::weights(0, 0), p[0], warp, lane);
        if constexpr (kTerms == 2) {
          if (rough) store_weights(base + M::weights(0, 1), p[1], warp, lane);
        }
        tell(kEvenThere);
        scale_values(o, scale);
        meet(kOddThere);
        bool other_rough = kTerms == 2 && __shfl_sync(~0u, rest.rough[1], 0);
        products_begin();
        weigh_other(0);
        if constexpr (kTerms == 2) {
          if (other_rough) {
            products_begin();
            weigh_other(1);
          }
        }
        products_commit();
        parity ^= 1;
        if (n + 1 < pairs) {
          // The scores of the next pair are computed meanwhile.
          side_scores(0, 0);
          products_wait_but<1>(o);
          free(kOther);
          side_scores(1, 1);
          products_wait_but<0>(s);
        } else {
          products_wait_but<0>(o);
          free(kOther);
        }
      }

      bool last = n + 1 == pairs;
      if (!last && (n + 1) % segment_pairs != 0) continue;
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (lane % 4 == 0) rest.sums[kOdd][row + 8 * i] = sum[i];
      meet(kBoth);
#pragma unroll
      for (int i = 0; i < 2; i++) sum[i] = rest.sums[0][row + 8 * i] + rest.sums[1][row + 8 * i];
      if (r.split) break;
      float own[2], other[2];
      bool more[2];
#pragma unroll
      for (int i = 0; i < 2; i++) more[i] = running[i].merge(max[i], sum[i], own[i], other[i]);
      float4* slot = reinterpret_cast<float4*>(r.parts + blockIdx.x * slot_floats(r)) + tid + 128 * kOdd;
      // One address: the compiler would keep all 32 through the loop, and has no registers for them.
      asm volatile("" : "+l"(slot));
      bool first = n < segment_pairs;
      bool stays = __all_sync(~0u, own[0] == 1.f && own[1] == 1.f);
      scale_segment(o, other, more);
      if (last) {
        if (!first) merge_slot<true>(o, slot, own);
      } else if (first) {
        add_to_slot<true>(o, slot);
      } else if (stays) {
        add_to_slot<false>(o, slot);
      } else {
        merge_slot<false>(o, slot, own);
      }
      if (!last) {
#pragma unroll
        for (int i = 0; i < 128; i++) o[i] = 0.f;
        max[0] = max[1] = minus_infinity();
        sum[0] = sum[1] = squares[0] = squares[1] = 0.f;
      }
    }

    if (r.split) {
      float* slot = r.parts + job * slot_floats(r);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int head = row + 8 * i;
        if (head >= unit.heads) continue;
        float* sums = slot + 64 * 512 + head;
        if (!kOdd && lane % 4 == 0) {
          sums[0] = max[i];
          sums[64] = sum[i];
        }
        float* to = slot + head * 512 + kSide * 256 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 32; j++)
          *reinterpret_cast<float2*>(to + 8 * j) = make_float2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
      }
      continue;
    }
    float share[2];
    T* out[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int head = row + 8 * i;
      bool exists = head < unit.heads;
      int row_head = unit.first_head + (exists ? head : 0);
      float sink = r.sink ? r.sink[row_head * r.sink_stride] : 0.f;
      share[i] = running[i].share(r.sink != nullptr, sink);
      out[i] = exists ? static_cast<T*>(r.out) + unit.row * r.out_row + row_head * r.out_head + kSide * 256 +
                            lane % 4 * 2
                      : nullptr;
      if (!kOdd && exists && lane % 4 == 0) r.lse[unit.row * r.lse_row + row_head * r.lse_head] = running[i].lse();
    }
    store_values<T>(o, out, share, running, r.aligned & 8);
  }
}

template <typename T, int kKeyDim>
__device__ void run(const Request& r) {
  using M = Memory<kKeyDim>;
  extern __shared__ __align__(16) uint8_t memory[];
  // Rows are permuted by the lower bits of their address.
  uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  Rest& rest = *reinterpret_cast<Rest*>(memory + (base - start) + M::kRest);
  if (threadIdx.x == 0) {
    for (int which = 0; which < 2; which++) {
      for (int side = 0; side < 2; side++) {
        barrier_init(shared_address(&rest.ready[which][side]), 64);
        barrier_init(shared_address(&rest.free[which][side]), 4);
      }
      barrier_init(shared_address(&rest.known[which]), 2);
      barrier_init(shared_address(&rest.voted[which]), 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
  }
  __syncthreads();
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  int tid = threadIdx.x % 128;
  if (group == 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    attend<T, kKeyDim, false>(r, base, rest, tid);
  } else if (group == 1) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    attend<T, kKeyDim, true>(r, base, rest, tid);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    int half = tid / 32 % 2, lane = tid % 32;
    if (tid < 64)
      gather<T, kKeyDim, 0>(r, base, rest, half, lane);
    else
      gather<T, kKeyDim, 1>(r, base, rest, half, lane);
  }
}

}  // namespace sparse::latent

#define SPARSE_LATENT(T)                                                    \
  extern "C" __global__ void __launch_bounds__(sparse::latent::kThreads, 1) \
      sparse_latent_576(const __grid_constant__ sparse::Request r) {        \
    sparse::latent::run<T, 576>(r);                                         \
  }                                                                         \
  extern "C" __global__ void __launch_bounds__(sparse::latent::kThreads, 1) \
      sparse_latent_512(const __grid_constant__ sparse::Request r) {        \
    sparse::latent::run<T, 512>(r);                                         \
  }
