// Philox4x32-10 (Salmon et al., SC'11): src/sampling/philox.rs on the device.
#pragma once

// The 64 bits that a request draws at a step: key `seed`, counter `step`.
__device__ __forceinline__ unsigned long long philox_draw(long long seed, long long step) {
  unsigned c0 = (unsigned)step, c1 = (unsigned)(step >> 32), c2 = 0, c3 = 0;
  unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
#pragma unroll 1
  for (int round = 0; round < 10; round++) {
    const unsigned hi0 = __umulhi(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
    const unsigned hi1 = __umulhi(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
    c0 = hi1 ^ c1 ^ k0, c1 = lo1;
    c2 = hi0 ^ c3 ^ k1, c3 = lo0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return (unsigned long long)c1 << 32 | c0;
}
