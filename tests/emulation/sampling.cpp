// The kernels of sampling, one form of them: FORM_THREADS, FORM_CANDIDATES and FORM_CLUSTER are what the .cu
// files of the form say. Reads cases and writes what comes of them until the input ends; sampling.rs
// says what.
#include <emulator/runtime.hpp>

constexpr int kThreads = FORM_THREADS, kCandidates = FORM_CANDIDATES;
#include "../../kernels/sampling/candidates.cuh"
#include "../../kernels/sampling/mask.cuh"
#include "../../kernels/sampling/sample.cuh"

struct Case {
  unsigned op, dtype, rows, vocab, row_stride, shift, blocks, staged, joint, capacity, seed;
};

static bool read(void* to, size_t size) { return fread(to, 1, size, stdin) == size; }
template <class V>
static void write(const std::vector<V>& values) {
  if (fwrite(values.data(), sizeof(V), values.size(), stdout) != values.size()) abort();
}

// Elements from a boundary of 16 bytes on.
template <class T>
struct Aligned {
  std::vector<T> values;
  T* begin;
  explicit Aligned(size_t size, T value) : values(size + 16, value) {
    begin = reinterpret_cast<T*>(((uintptr_t)values.data() + 15) / 16 * 16);
  }
};

template <class T>
static void run(const Case& c) {
  constexpr int C = FORM_CLUSTER;
  std::vector<float> params(4 * c.rows);
  std::vector<long long> counters(2 * c.rows);
  Aligned<T> logits(c.shift + (size_t)c.rows * c.row_stride, from_bits<T>(Bits<T>::kNan));
  if (!read(params.data(), params.size() * sizeof(float)) || !read(counters.data(), counters.size() * sizeof(long long)) ||
      !read(logits.begin + c.shift, (size_t)c.rows * c.row_stride * sizeof(T))) {
    abort();
  }
  std::vector<unsigned> routes(4 * c.rows);
  Request request = {};
  request.logits = logits.begin + c.shift, request.row_stride = c.row_stride;
  request.params = params.data(), request.params_row = 4, request.params_column = 1;
  request.vocab = (int)c.vocab, request.joint = (int)c.joint, request.routes = routes.data();
  constexpr unsigned kWidth = 16 / sizeof(T);
  const unsigned vectors = (c.vocab + 2 * (kWidth - 1)) / kWidth, slice = (vectors + c.blocks - 1) / c.blocks * 16;
  const unsigned bytes = sizeof(Shared<C>) + (c.staged ? slice : 0);
  const auto launch = [&](auto kernel) { emulator::launch(c.rows, c.blocks, kThreads, bytes, c.seed, kernel); };
  if (c.op == 0) {
    std::vector<T> out((size_t)c.rows * c.vocab, from_bits<T>(0x1234));
    launch([&] { mask<T, C>(request, out.data(), c.vocab); });
    write(out);
  } else if (c.op == 1) {
    std::vector<unsigned> tokens(c.rows, 0x55555555), notes(c.rows, 0x55);
    std::vector<float> log_probs(c.rows, 123.0f);
    const DrawSource draws = {counters.data(), 2, 1, nullptr, 0, 0};
    const SampleOutputs outputs = {tokens.data(), notes.data(), log_probs.data(), nullptr, 0};
    launch([&] { sample<T, C>(request, draws, outputs); });
    write(tokens), write(notes), write(log_probs);
  } else {
    std::vector<unsigned> ids((size_t)c.rows * c.capacity, 0x55555555), counts(c.rows, 0x55);
    std::vector<float> log_probs(ids.size(), 123.0f);
    launch([&] { candidates<T, C>(request, ids.data(), log_probs.data(), counts.data(), c.capacity); });
    write(counts), write(ids), write(log_probs);
  }
  write(routes);
  fflush(stdout);
}

int main() {
  Case c;
  while (read(&c, sizeof(c))) {
    if (c.dtype == 0) run<float>(c);
    else if (c.dtype == 1) run<__nv_bfloat16>(c);
    else run<__half>(c);
  }
}
