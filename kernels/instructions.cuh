// Warp-level and architecture-specific instructions, each wrapped once by name. The only file in kernels/ that asks
// which device it is compiled for; each wrapper has a body for both.
#pragma once

#include <cuda_runtime.h>

#if defined(__CUDACC__)

// Butterfly over the 32 lanes; every lane gets the result.
__device__ inline float warp_reduce_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__device__ inline float warp_reduce_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

#else

// The same tree in one collective: five times fewer waits for the CPU device's fibers, the same bits.
inline float warp_reduce_sum(float value, cpu::Location where = cpu::Location::current()) {
  return cpu::reduce(0xffffffffu, value, cpu::Reduction::sum, where);
}

inline float warp_reduce_max(float value, cpu::Location where = cpu::Location::current()) {
  return cpu::reduce(0xffffffffu, value, cpu::Reduction::max, where);
}

#endif
