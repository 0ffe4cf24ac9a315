// The kernels of sampling, one form of them: FORM_THREADS, FORM_CANDIDATES and FORM_CLUSTER are what the .cu
// files of the form say. Or RUN, the .cu file of a run of the ablation: for f32, without candidates. Reads
// cases and writes what comes of them until the input ends; sampling.rs says what.
#include <emulator/cases.hpp>
#include <emulator/runtime.hpp>

#ifdef RUN
#define FORM_CLUSTER 1
#include RUN
#else
constexpr int kThreads = FORM_THREADS, kCandidates = FORM_CANDIDATES;
#include "../../kernels/sampling/candidates.cuh"
#include "../../kernels/sampling/mask.cuh"
#include "../../kernels/sampling/sample.cuh"
#endif

struct Case {
  unsigned op, dtype, rows, vocab, row_stride, shift, blocks, staged, joint, capacity, seed;
  unsigned draws;  // by the counters; all the lowest; all the highest
};

template <class T>
static void run(const Case& c) {
  constexpr int C = FORM_CLUSTER;
  std::vector<float> params(4 * c.rows);
  std::vector<long long> counters(2 * c.rows);
  emulator::Aligned<T> logits(c.shift + (size_t)c.rows * c.row_stride, from_bits<T>(Bits<T>::kNan));
  emulator::read_all(params.data(), params.size());
  emulator::read_all(counters.data(), counters.size());
  emulator::read_all(logits.begin + c.shift, (size_t)c.rows * c.row_stride);
  std::vector<unsigned> routes(4 * c.rows);
  Request request = {};
  request.logits = logits.begin + c.shift, request.row_stride = c.row_stride;
  request.params = params.data(), request.params_row = 4, request.params_column = 1;
  request.vocab = (int)c.vocab, request.joint = (int)c.joint, request.routes = routes.data();
  constexpr unsigned kWidth = 16 / sizeof(T);
  constexpr unsigned kLine = Row<T>::kLine;
  const unsigned vectors = (c.vocab + 2 * (kWidth - 1)) / kWidth, each = (vectors + c.blocks - 1) / c.blocks;
  const unsigned bytes = sizeof(Shared<C>) + (c.staged ? ((each + kLine - 1) / kLine * kLine + kLine) * 16 : 0);
#ifdef RUN
  std::vector<u64> scratch(2 * (size_t)c.rows * c.vocab, 0x5555555555555555);
  sort_scratch = scratch.data();
#endif
  const auto launch = [&](auto kernel) { emulator::launch(c.rows, c.blocks, kThreads, bytes, c.seed, kernel); };
  if (c.op == 0) {
    std::vector<T> out((size_t)c.rows * c.vocab, from_bits<T>(0x1234));
    launch([&] { mask<T, C>(request, out.data(), c.vocab); });
    emulator::write(out);
  } else if (c.op == 1) {
    std::vector<unsigned> tokens(c.rows, 0x55555555), notes(c.rows, 0x55);
    std::vector<float> log_probs(c.rows, 123.0f);
    const std::vector<unsigned> bits(c.rows, c.draws == 2 ? ~0u : 0u);
    DrawSource draws = {counters.data(), 2, 1, nullptr, 0, 0};
    if (c.draws) draws = {nullptr, 0, 0, bits.data(), 1, 0};
    const SampleOutputs outputs = {tokens.data(), notes.data(), log_probs.data(), nullptr, 0};
    launch([&] { sample<T, C>(request, draws, outputs); });
    emulator::write(tokens), emulator::write(notes), emulator::write(log_probs);
  } else {
#ifdef RUN
    abort();
#else
    std::vector<unsigned> ids((size_t)c.rows * c.capacity, 0x55555555), counts(c.rows, 0x55);
    std::vector<float> log_probs(ids.size(), 123.0f);
    launch([&] { candidates<T, C>(request, ids.data(), log_probs.data(), counts.data(), c.capacity); });
    emulator::write(counts), emulator::write(ids), emulator::write(log_probs);
#endif
  }
  emulator::write(routes);
}

int main() {
  emulator::run_cases<Case>([](const Case& c, auto element) {
#ifdef RUN
    if constexpr (std::is_same_v<decltype(element), float>) run<float>(c);
    else abort();
#else
    run<decltype(element)>(c);
#endif
  });
}
