// The kernels of selection. Reads cases and writes what comes of them until the input ends;
// selection.rs says what.
#include <emulator/cases.hpp>
#include <emulator/runtime.hpp>

constexpr int kThreads = 512;
#include "../../kernels/selection/block.cuh"
#include "../../kernels/selection/cluster.cuh"
#include "../../kernels/selection/exact.cuh"
#include "../../kernels/selection/held.cuh"
#include "../../kernels/selection/short.cuh"
#include "../../kernels/selection/split.cuh"

enum Mapping { kShort, kBlock, kRowLocal, kSplit, kCluster, kExact, kHeld };

struct Case {
  unsigned mapping, dtype, rows, width, pitch, shift, k, order, values, bounds, blocks, capacity, stride, fixed_stride,
      band, shared_bytes, workspace_words, seed;
  float margin, deviations;
};

template <class T>
static void run(const Case& c) {
  // I64 bounds; those of a batch may be told in each of their dtypes.
  std::vector<long long> bounds(2 * c.rows);
  const size_t size = (size_t)c.rows * c.pitch;
  emulator::Aligned<T> memory(c.shift + size, from_bits<T>(Bits<T>::kNan));
  T* const scores = memory.begin + c.shift;
  emulator::read_all(bounds.data(), bounds.size());
  emulator::read_all(scores, size);
  std::vector<int> narrow(bounds.size());
  for (size_t i = 0; i < bounds.size(); i++) {
    narrow[i] = (int)std::min(std::max(bounds[i], (long long)INT32_MIN), (long long)INT32_MAX);
  }
  std::vector<unsigned> positions((size_t)c.rows * c.k, 0x55555555), counts(c.rows, 0x55), routes(4 * c.rows);
  std::vector<float> values(positions.size(), 123.0f);
  std::vector<unsigned> workspace(c.workspace_words + 16);
  Request r = {};
  r.scores = scores, r.pitch = c.pitch, r.positions = positions.data(), r.counts = counts.data();
  r.values = c.values ? values.data() : nullptr, r.routes = routes.data();
  r.workspace = reinterpret_cast<unsigned*>(((uintptr_t)workspace.data() + 63) / 64 * 64);
  r.width = (int)c.width, r.k = (int)c.k, r.capacity = (int)c.capacity, r.stride = (int)c.stride;
  r.margin = c.margin, r.deviations = c.deviations;
  r.order = (int)c.order, r.band = (int)c.band, r.fixed_stride = (int)c.fixed_stride, r.blocks = (int)c.blocks;
  // 0: none, 1: ends alone as I32, 2: both as I64, 3: both as I32, 4: both as U32, of which those from 2^31 up
  // are negative numbers.
  const auto bound = [&](bool end) -> Bound {
    if (c.bounds == 2) return {bounds.data() + end, 2, kI64};
    return {narrow.data() + end, 2, c.bounds == 4 ? kU32 : kI32};
  };
  if (c.bounds >= 2) r.start = bound(false);
  if (c.bounds >= 1) r.end = bound(true);
  const auto launch = [&](unsigned teams, unsigned blocks, auto kernel, bool at_once = false) {
    emulator::launch(teams, blocks, kThreads, c.shared_bytes, c.seed, kernel, at_once);
  };
  switch (c.mapping) {
    case kShort: launch(c.rows, 1, [&] { select_short<T>(r); }); break;
    case kBlock: launch(c.rows, 1, [&] { select_block<T, false>(r); }); break;
    case kRowLocal: launch(c.rows, 1, [&] { select_block<T, true>(r); }); break;
    case kSplit: launch(c.rows * c.blocks, 1, [&] { select_split<T>(r); }, true); break;
    case kCluster: launch(c.rows, c.blocks, [&] { select_cluster<T>(r); }); break;
    case kHeld: launch(c.rows, 1, [&] { select_held<T>(r); }); break;
    case kExact: launch(c.rows, c.blocks, [&] { select_exact<T>(r); }); break;
    default: abort();
  }
  emulator::write(counts), emulator::write(positions), emulator::write(routes);
  if (c.values) emulator::write(values);
}

int main() {
  emulator::run_cases<Case>([](const Case& c, auto element) { run<decltype(element)>(c); });
}
