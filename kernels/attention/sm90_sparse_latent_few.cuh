// Multi-head latent attention over positions of few rows, for compute capability 9.0: a segment of 64
// heads by a cluster of eight blocks. It does what sm90_sparse_latent.cuh does, number by number.
//
// 1. A member of the cluster has 64 keys of the segment, all of which it gathers at once, and their
//    scores; and 64 columns of the values of all keys.
// 2. Members tell each other the greatest scores of their rows, so that all know what the weights of
//    each block are relative to; then the sums of the weights, so that all know which blocks have
//    second terms that count.
// 3. Meanwhile each sends its columns of values to those that weigh them, where queries lay; then its
//    weights, the first terms, and the second where the keys lay.
// 4. Weights of an even block are relative to its own maximum in the left half of the columns, and
//    to the pair's in the right half, where the odd block comes first: as two warpgroups have it
//    that take turns.
// 5. There is little code, and one copy of it: it is in no cache when it is needed.

#pragma once
#include "../common/cluster.cuh"
#include "sm90_sparse_latent.cuh"

namespace sparse::latent::few {

constexpr int kMembers = 8;  // of a cluster, which is also the number of its blocks of 64 keys
constexpr int kThreads = 256;
constexpr int kQueries = 0;             // nine tiles, then one of values of each block
constexpr int kKeys = 9 * kTile;        // nine tiles, then the second terms of each block
constexpr int kFirst = 2 * 9 * kTile;   // the first terms of each block
constexpr int kRest = kFirst + kMembers * kTile;
constexpr int kSegment = 64 * kMembers;

struct Rest {
  uint64_t ready;            // queries and keys are gathered
  uint64_t maxima, sums;     // all members have told theirs
  uint64_t values;           // all columns are there
  uint64_t free;             // all members' keys have been sent
  uint64_t full[kMembers];   // weights are there
  uint16_t exists[4];        // which keys are there, by the warp that gathers them
  uint32_t rough[4];         // which blocks have second terms that count, by the rows of a warp
  float max[kMembers][64];   // the greatest score, then what the weights are relative to
  float2 sum[kMembers][64];  // of weights, and of their squares
};
constexpr int kBytes = kRest + int(sizeof(Rest)) + 1024;
static_assert(kBytes == 26 * 8192 + 6272 + 1024, "Few::SHARED_BYTES says so");

// Where a member of the cluster has what lies at `at` here.
__device__ inline uint32_t of_member(uint32_t at, int member) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(member));
  return there;
}
__device__ inline void send(uint32_t to, uint32_t barrier, float x) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(x)), "r"(barrier)
               : "memory");
}
__device__ inline void send(uint32_t to, uint32_t barrier, float2 x) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(barrier)
               : "memory");
}
// A tile, by one thread.
__device__ inline void send_tile(uint32_t to, uint32_t barrier, uint32_t from) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "r"(from), "n"(kTile), "r"(barrier)
      : "memory");
}
// Until this thread's tiles have been read.
__device__ inline void tiles_sent() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
// It publishes nothing: what it says is that something was read.
__device__ inline void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The four warps that multiply.
__device__ inline void meet_all() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// Eight numbers of each tile of a key.
template <int kTiles, int T = 0>
__device__ inline void fetch_key(uint32_t to, const void* from, bool exists) {
  if constexpr (T < kTiles) {
    copy_async<T * kTile, T * 128>(to, from, exists);
    fetch_key<kTiles, T + 1>(to, from, exists);
  }
}
// Eight numbers, which need not lie at a multiple of 16 bytes.
__device__ inline void fetch_piece(uint32_t to, const uint16_t* from, bool exists, bool aligned) {
  if (aligned) {
    copy_async<0, 0>(to, from, exists);
  } else {
    put_16(to, load_singly(from, exists));
  }
}

struct Share {
  int local, segment, rank;
  Unit unit;

  __device__ explicit Share(const Request& r)
      : local(blockIdx.x / kMembers / uint32_t(r.segments)),
        segment(blockIdx.x / kMembers - local * r.segments),
        rank(blockIdx.x % kMembers),
        unit(r, r.first_unit + local) {}
};

// Four warps: a warp has 16 keys, which begin where the lanes say.
template <typename T, int kKeyDim>
__device__ void gather(const Request& r, const Share& share, int64_t at, uint32_t base, Rest& rest, int warp,
                       int lane) {
  constexpr int kTiles = kKeyDim / 64;
  uint32_t exists = __ballot_sync(~0u, at >= 0);
  const uint16_t* keys = static_cast<const uint16_t*>(r.keys.at) + share.unit.kv_head * r.keys.head + lane % 8 * 8;
  const uint16_t* somewhere = aligned_down(static_cast<const uint16_t*>(r.q));
  bool aligned = r.aligned & 2;
#pragma unroll 1
  for (int i = 0; i < 4; i++) {
    int64_t offset = __shfl_sync(~0u, at, 4 * i + lane / 8);
    int row = warp * 16 + 4 * i + lane / 8;
    uint32_t to = base + kKeys + row * 128 + ((lane % 8 ^ (row & 7)) << 4);
    const uint16_t* from = offset >= 0 ? keys + offset : somewhere;
    if (aligned) {
      fetch_key<kTiles>(to, from, offset >= 0);
    } else {
#pragma unroll 1
      for (int t = 0; t < kTiles; t++) fetch_piece(to + t * kTile, from + 64 * t, offset >= 0, false);
    }
  }
  if (lane == 0) {
    rest.exists[warp] = static_cast<uint16_t>(exists);
    barrier_arrive(shared_address(&rest.ready));
  }
  barrier_arrive_after_fetching(shared_address(&rest.ready), aligned);
  __syncwarp();
  cluster_wait();

  // Columns to those that weigh them, who are all done with their queries. Every lane has a member.
  if (warp == 0 && lane < kMembers) {
    barrier_wait(shared_address(&rest.ready), 0);
    barrier_wait(shared_address(&rest.maxima), 0);
    fence_async();
    int member = (share.rank + lane) % kMembers;
    if (lane > 0)
      send_tile(of_member(base + kQueries + share.rank * kTile, member),
                of_member(shared_address(&rest.values), member), base + kKeys + member * kTile);
    tiles_sent();
  }
  __syncwarp();
  if (warp == 0 && lane < kMembers) arrive_at(of_member(shared_address(&rest.free), lane));
}

// Four warps: scores of the own keys, and then the own columns of the values.
template <typename T, int kKeyDim>
__device__ void attend(const Request& r, const Share& share, uint32_t base, Rest& rest, int tid) {
  constexpr int kTiles = kKeyDim / 64, kTerms = Terms<T>::kCount;
  int warp = tid / 32, lane = tid % 32, rank = share.rank;
  int row = warp * 16 + lane / 4;  // and the one 8 further on
  bool odd = rank % 2, right = rank >= kMembers / 2;

  float s[32];
#pragma unroll
  for (int i = 0; i < 32; i++) s[i] = 0.f;
  barrier_wait(shared_address(&rest.ready), 0);
  fence_async();
  products_begin();
#pragma unroll 1
  for (int i = 0; i < kTiles; i++) {
    // Odd blocks begin with the right half of the columns.
    int t = odd && i < 8 ? i ^ 4 : i;
    uint64_t a = operand_in_blocks(base + kQueries + t * kTile), b = operand_in_blocks(base + kKeys + t * kTile);
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_64<T>(s, further(a, 32 * k), further(b, 32 * k), i + k > 0);
  }
  products_commit();
  products_wait_but<0>(s);
  uint32_t exists[2] = {rest.exists[0] | uint32_t(rest.exists[1]) << 16,
                        rest.exists[2] | uint32_t(rest.exists[3]) << 16};
#pragma unroll
  for (int i = 0; i < 32; i++) s[i] *= r.scale;
  mask(s, exists, lane);
  float most[4];
  greatest_scores(s, most);
  __syncwarp();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float x = greatest_of_row(greater(most[2 * i], most[2 * i + 1]));
#pragma unroll
    for (int j = 0; j < 2; j++)
      send(of_member(shared_address(&rest.max[rank][row + 8 * i]), lane % 4 + 4 * j),
           of_member(shared_address(&rest.maxima), lane % 4 + 4 * j), x);
  }
  barrier_wait(shared_address(&rest.maxima), 0);

  // What the weights of each block are relative to.
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float now = minus_infinity(), all[kMembers];
#pragma unroll
    for (int j = 0; j < kMembers; j++) all[j] = now = follow(now, rest.max[j][row + 8 * i]);
    __syncwarp();
    if (lane % 4 == 0) {
#pragma unroll
      for (int j = 0; j < kMembers; j++) rest.max[j][row + 8 * i] = all[j];
    }
  }
  __syncwarp();
  float max[2] = {rest.max[rank][row], rest.max[rank][row + 8]};
  {
    float added[4] = {0.f, 0.f, 0.f, 0.f}, squared[4] = {0.f, 0.f, 0.f, 0.f};
    float against[2] = {reference(max[0]), reference(max[1])};
#pragma unroll
    for (int i = 0; i < 32; i++) {
      s[i] = power(s[i] - against[i / 2 % 2]);
      added[i % 4] += s[i];
      if constexpr (kTerms == 2) squared[i % 4] = __fmaf_rn(s[i], s[i], squared[i % 4]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float2 more = make_float2(sum_of_row(added[2 * i] + added[2 * i + 1]),
                                sum_of_row(squared[2 * i] + squared[2 * i + 1]));
#pragma unroll
      for (int j = 0; j < 2; j++)
        send(of_member(shared_address(&rest.sum[rank][row + 8 * i]), lane % 4 + 4 * j),
             of_member(shared_address(&rest.sums), lane % 4 + 4 * j), more);
    }
  }
  barrier_wait(shared_address(&rest.sums), 0);

  // Sums, and where they say that few keys have the weight: of one of the two rows by each lane.
  float total[2];
  bool few[2];
  uint32_t rough = 0;
  {
    int own_row = row + 8 * (lane % 2);
    float sum[2] = {0.f, 0.f}, squares[2] = {0.f, 0.f}, before = minus_infinity();
#pragma unroll 2
    for (int j = 0; j < kMembers; j += 2) {
      float of_even = rest.max[j][own_row], of_odd = rest.max[j + 1][own_row];
      float scale[2] = {moved(before, of_even), moved(before, of_odd)}, later = moved(of_even, of_odd);
#pragma unroll
      for (int which = 0; which < 2; which++) {
        float2 more = rest.sum[j + which][own_row];
        sum[which] = __fmaf_rn(sum[which], scale[which], more.x);
        if constexpr (kTerms == 2) {
          squares[which] = __fmaf_rn(squares[which], scale[which] * scale[which], more.y);
          rough |= uint32_t(!are_many(sum[which], squares[which])) << (j + which);
        }
      }
      // As the other kernel has it, where the product goes through memory: it becomes no part of the sum below.
      sum[0] = __fmul_rn(sum[0], later);
      squares[0] = __fmul_rn(squares[0], later * later);
      before = of_odd;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      total[i] = __shfl_sync(~0u, __fadd_rn(sum[0], sum[1]), lane / 4 * 4 + i);
      few[i] = __shfl_sync(~0u, rough, lane / 4 * 4 + i) >> rank & 1;
    }
  }
  if constexpr (kTerms == 2) {
    rough = __reduce_or_sync(~0u, rough);
    if (lane == 0) rest.rough[warp] = rough;
    meet_all();
    rough = __shfl_sync(~0u, rest.rough[0] | rest.rough[1] | rest.rough[2] | rest.rough[3], 0);
  }
  bool own_rough = rough >> rank & 1;
  if (tid < kMembers && tid != rank)
    barrier_arrive_expect(shared_address(&rest.full[tid]), kTile << (rough >> tid & 1));

  // Weights, as the left half of the columns needs them and as the right does.
  uint32_t p[kTerms][16];
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    p[0][i / 2] = pair<T>(s[i], s[i + 1]);
    if constexpr (kTerms == 2) p[1][i / 2] = few[i / 2 % 2] ? second_term(s[i], s[i + 1], p[0][i / 2]) : 0;
  }
  auto second = [&](int block) { return base + kKeys + (block < rank ? block : block + 1) * kTile; };
  // The own half's lie where they are weighed, the other's in tiles that nothing reads any more.
  uint32_t own[2] = {base + kFirst + rank * kTile, second(rank)};
  uint32_t other[2] = {base + kQueries + 8 * kTile, base + kQueries + rank * kTile};
#pragma unroll 1
  for (int side = 0; side < (odd ? 1 : 2); side++) {
    if (side == 1) {
      float scale[2] = {moved(max[0], rest.max[rank + 1][row]), moved(max[1], rest.max[rank + 1][row + 8])};
      if (!__all_sync(~0u, scale[0] == 1.f && scale[1] == 1.f)) {
#pragma unroll
        for (int i = 0; i < 16; i++) scale_weights<T>(p, i, scale[i % 2], few[i % 2]);
      }
    }
    bool here = odd || side == right;
    store_weights(here ? own[0] : other[0], p[0], warp, lane);
    if constexpr (kTerms == 2) {
      if (own_rough) {
        if (side == 0) barrier_wait(shared_address(&rest.free), 0);
        store_weights(here ? own[1] : other[1], p[1], warp, lane);
      }
    }
  }
  meet_all();
  // The first terms by a warp, the second by another, of which every lane has a member.
  if (warp < (own_rough ? 2 : 1) && lane > 0 && lane < kMembers) {
    int member = (rank + lane) % kMembers;
    bool here = odd || (member >= kMembers / 2) == right;
    uint32_t to = warp == 0 ? own[0] : base + kKeys + (rank < member ? rank : rank + 1) * kTile;
    uint32_t from = here ? (warp == 0 ? own[0] : own[1]) : (warp == 0 ? other[0] : other[1]);
    send_tile(of_member(to, member), of_member(shared_address(&rest.full[rank]), member), from);
  }
  __syncwarp();

  float o[32], before[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
  for (int i = 0; i < 32; i++) o[i] = 0.f;
  barrier_wait(shared_address(&rest.values), 0);
#pragma unroll 1
  for (int j = 0; j < kMembers; j++) {
    // The left half of the columns follows every block, the right half every pair.
    int block = right ? j ^ 1 : j;
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float now = rest.max[right ? j | 1 : j][row + 8 * i];
      scale[i] = moved(before[i], now);
      before[i] = now;
    }
    if (j > 0 && !__all_sync(~0u, scale[0] == 1.f && scale[1] == 1.f)) {
      products_wait_but<0>(o);
#pragma unroll
      for (int i = 0; i < 32; i++) o[i] *= scale[i / 2 % 2];
    }
    if (block != rank) barrier_wait(shared_address(&rest.full[block]), 0);
    uint32_t values = base + (block == rank ? kKeys : kQueries) + block * kTile;
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; i++)
      multiply_across<T>(o, operand_in_blocks(base + kFirst + block * kTile + 32 * i),
                         operand_in_blocks(values + i * 2048, kTile));
    if constexpr (kTerms == 2) {
      if (rough >> block & 1) {
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
          multiply_across<T>(o, operand_in_blocks(second(block) + 32 * i), operand_in_blocks(values + i * 2048, kTile));
      }
    }
    products_commit();
  }
  products_wait_but<0>(o);

#pragma unroll
  for (int i = 0; i < 2; i++) {
    int head = row + 8 * i;
    float greatest = rest.max[kMembers - 1][head];
    if (head >= share.unit.heads) continue;
    bool first = rank == 0 && lane % 4 == 0;
    int column = rank * 64 + lane % 4 * 2;
    if (r.split) {
      float* slot = r.parts + int64_t(blockIdx.x / kMembers) * slot_floats(r);
      if (first) {
        slot[64 * 512 + head] = greatest;
        slot[64 * 512 + 64 + head] = total[i];
      }
#pragma unroll
      for (int j = 0; j < 8; j++)
        *reinterpret_cast<float2*>(slot + head * 512 + column + 8 * j) =
            make_float2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
      continue;
    }
    Running running;
    float mine, added;
    bool more = running.merge(greatest, total[i], mine, added);
    int row_head = share.unit.first_head + head;
    float sink = r.sink ? r.sink[row_head * r.sink_stride] : 0.f;
    float part = running.share(r.sink != nullptr, sink);
    T* out = static_cast<T*>(r.out) + share.unit.row * r.out_row + row_head * r.out_head + column;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        x[e] = more ? o[4 * j + 2 * i + e] : 0.f;
        if (added != 1.f) x[e] = Running::added(x[e], added);
        x[e] = running.finished(x[e], part);
      }
      if (r.aligned & 8) {
        *reinterpret_cast<uint32_t*>(out + 8 * j) = pair<T>(x[0], x[1]);
      } else {
        out[8 * j] = narrow<T>(x[0]);
        out[8 * j + 1] = narrow<T>(x[1]);
      }
    }
    if (first) r.lse[share.unit.row * r.lse_row + row_head * r.lse_head] = running.lse();
  }
  // No weights are read after their block has ended.
  tiles_sent();
  // Nor is a barrier of a block that has ended arrived at.
  barrier_wait(shared_address(&rest.free), 0);
}

template <typename T, int kKeyDim>
__device__ void run(const Request& r) {
  constexpr int kTiles = kKeyDim / 64;
  extern __shared__ __align__(16) uint8_t memory[];
  // Rows are permuted by the lower bits of their address, which is the same in all members.
  uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  Rest& rest = *reinterpret_cast<Rest*>(memory + (base - start) + kRest);
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Share share(r);
  // What takes longest first.
  int64_t at = kNowhere;
  if (warp >= 4) {
    Finder finder(r, share.unit.row, share.unit.kv_head);
    int64_t number = int64_t(share.segment) * kSegment + share.rank * 64 + (warp - 4) * 16 + lane % 16;
    int64_t position = finder.position(r, number, finder.entry(r, number));
    at = Finder::at(r, r.keys, position, finder.outer(r, position));
  }
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&rest.ready), kThreads + 4);
    barrier_init(shared_address(&rest.maxima), 1);
    barrier_init(shared_address(&rest.sums), 1);
    barrier_init(shared_address(&rest.values), 1);
    barrier_init(shared_address(&rest.free), kMembers);
#pragma unroll 1
    for (int i = 0; i < kMembers; i++) barrier_init(shared_address(&rest.full[i]), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
    barrier_arrive_expect(shared_address(&rest.maxima), sizeof(rest.max));
    barrier_arrive_expect(shared_address(&rest.sums), sizeof(rest.sum));
    barrier_arrive_expect(shared_address(&rest.values), (kMembers - 1) * kTile);
  }
  __syncthreads();
  // Nobody may be sent anything before it is there.
  cluster_arrive_relaxed();
  if (warp >= 4) {
    gather<T, kKeyDim>(r, share, at, base, rest, warp - 4, lane);
    return;
  }
  // Two threads have a head.
  int head = threadIdx.x / 2;
  bool exists = head < share.unit.heads, aligned = r.aligned & 1;
  const uint16_t* from = static_cast<const uint16_t*>(r.q) + share.unit.row * r.q_row +
                         (share.unit.first_head + (exists ? head : 0)) * r.q_head + threadIdx.x % 2 * 32;
  uint32_t to = base + kQueries + head * 128;
#pragma unroll 1
  for (int t = 0; t < kTiles; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      fetch_piece(to + t * kTile + ((threadIdx.x % 2 * 4 + i ^ (head & 7)) << 4), from + t * 64 + 8 * i, exists,
                  aligned);
  }
  barrier_arrive_after_fetching(shared_address(&rest.ready), aligned);
  attend<T, kKeyDim>(r, share, base, rest, threadIdx.x);
}

}  // namespace sparse::latent::few

#define SPARSE_LATENT_FEW(T)                                                                            \
  extern "C" __global__ void __cluster_dims__(8) __launch_bounds__(sparse::latent::few::kThreads, 1)    \
      sparse_latent_few_576(const __grid_constant__ sparse::Request r) {                                \
    sparse::latent::few::run<T, 576>(r);                                                                \
  }                                                                                                     \
  extern "C" __global__ void __cluster_dims__(8) __launch_bounds__(sparse::latent::few::kThreads, 1)    \
      sparse_latent_few_512(const __grid_constant__ sparse::Request r) {                                \
    sparse::latent::few::run<T, 512>(r);                                                                \
  }
