// Cases from the standard input, and what comes of them to the standard output.
#pragma once

#include <emulator/device.hpp>

#include <cstdio>
#include <cstdlib>

namespace emulator {

inline bool read(void* to, size_t size) { return fread(to, 1, size, stdin) == size; }

// What belongs to a case.
template <class V>
void read_all(V* to, size_t count) {
  if (!read(to, count * sizeof(V))) abort();
}

template <class V>
void write(const std::vector<V>& values) {
  if (fwrite(values.data(), sizeof(V), values.size(), stdout) != values.size()) abort();
}

// Elements from the beginning of a line on.
template <class T>
struct Aligned {
  std::vector<T> values;
  T* begin;
  explicit Aligned(size_t size, T value) : values(size + 128, value) {
    begin = reinterpret_cast<T*>(((uintptr_t)values.data() + 127) / 128 * 128);
  }
};

// run(case, an element of its dtype) for every case until the input ends.
template <class Case, class Run>
void run_cases(Run run) {
  Case c;
  while (read(&c, sizeof(c))) {
    if (c.dtype == 0) run(c, float());
    else if (c.dtype == 1) run(c, __nv_bfloat16());
    else run(c, __half());
    fflush(stdout);
  }
}

}  // namespace emulator
