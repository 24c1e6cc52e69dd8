// Warp-level and architecture-specific instructions, each wrapped once by name. The only file in kernels/ that asks
// which device it is compiled for; each wrapper has a body for both.
#pragma once

#include <cuda_runtime.h>

#if defined(__CUDACC__)

constexpr int pack_bytes = 16;  // the widest load or store of a thread

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

// x[k] = eˣ, tanh x for every k.
template <int N>
__device__ inline void exp_pack(float (&x)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = expf(x[k]);
}

template <int N>
__device__ inline void tanh_pack(float (&x)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = tanhf(x[k]);
}

#else

#if !defined(CPU_PACK_BYTES)
#define CPU_PACK_BYTES 64  // a cache line and an AVX-512 register; 16 shows what a GPU's threads do
#endif
constexpr int pack_bytes = CPU_PACK_BYTES;

// `omp simd` keeps g++ from unrolling these loops before it can turn them into calls of libmvec's vector functions.
template <int N>
inline void exp_pack(float (&x)[N]) {
#pragma omp simd
  for (int k = 0; k < N; ++k) x[k] = expf(x[k]);
}

template <int N>
inline void tanh_pack(float (&x)[N]) {
#pragma omp simd
  for (int k = 0; k < N; ++k) x[k] = tanhf(x[k]);
}

// The same tree in one collective: five times fewer waits for the CPU device's fibers, the same bits.
inline float warp_reduce_sum(float value, cpu::Location where = cpu::Location::current()) {
  return cpu::reduce(0xffffffffu, value, cpu::Reduction::sum, where);
}

inline float warp_reduce_max(float value, cpu::Location where = cpu::Location::current()) {
  return cpu::reduce(0xffffffffu, value, cpu::Reduction::max, where);
}

#endif
