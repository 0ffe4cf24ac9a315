// What selection uses of kernels/common/pipeline.cuh, on the CPU. Copies are there at once.
#pragma once

#include <emulator/device.hpp>

inline void copy_16(uint4* to, const uint4* from) { memcpy(to, from, sizeof(uint4)); }
inline void copies_commit() {}
template <int kNewer>
void copies_wait() {}
