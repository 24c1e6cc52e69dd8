// Tools that every kernel file uses: packs, block reductions, error checks (kernels/device/check.cuh), and the range
// that profiles a launcher (kernels/device/profile.cuh).
//
// A *pack* is the elements that a thread loads or stores at once: 16 bytes on a GPU (4 floats, 8 bf16), 64 on the CPU
// device. If a row's length is no multiple of that, packs are single elements, so that any size works.
//
// *Float* is the storage type in every kernel file: float (fp32), __nv_bfloat16 (bf16) or __half (fp16), the type in
// which weights and activations lie in memory. Arithmetic is in float for each of them.
//
// A kernel that is not a template is static, because several object files of a program may contain it.
// Its barriers are tested by test_embedding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/device/check.cuh"
#include "kernels/device/instructions.cuh"
#include "kernels/device/multiprocessors.h"
#include "kernels/device/profile.cuh"

// More than 48 KB of shared memory must be requested for each kernel.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// Copies `count` elements on the stream, and waits for the stream: for host memory that is read or freed soon after.
// The wait is needed for pageable memory, too: CUDA says only that such a copy "might be synchronous".
template <class T>
void copy_and_wait(T* to, const T* from, size_t count, cudaMemcpyKind kind, cudaStream_t stream) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, count * sizeof(T), kind, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

template <class T>
constexpr const char* dtype_name = std::is_same_v<T, float> ? "fp32" : std::is_same_v<T, __half> ? "fp16" : "bf16";

template <class Integer>
constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

template <class Integer>
constexpr Integer round_up(Integer a, Integer b) {
  return ceil_div(a, b) * b;
}

template <class T>
constexpr int pack_width = pack_bytes / int(sizeof(T));

// Calls function(std::integral_constant<int, N>), where N is the pack width if it divides `length`, the elements per
// row, and 1 otherwise. A lambda `[&](auto N) {...}` can use N as a number, and as a template argument.
template <class T, class Function>
void with_pack(int length, Function function) {
  if (length % pack_width<T> == 0) function(std::integral_constant<int, pack_width<T>>{});
  else function(std::integral_constant<int, 1>{});
}

// The blocks of an elementwise kernel: each thread has one pack. 256 threads keep enough loads in flight. So its launch is
//   kernel<<<pack_blocks(count / N), pack_block, 0, stream>>>(...)   with N of with_pack, or
//   kernel<<<float_pack_blocks(count), pack_block, 0, stream>>>(...) where N is of floats, and count a multiple of it
constexpr int pack_block = 256;
inline unsigned pack_blocks(size_t packs) { return unsigned(ceil_div(packs, size_t(pack_block))); }
inline unsigned float_pack_blocks(size_t count) { return pack_blocks(count / pack_width<float>); }

// Calls function(std::integral_constant<int, n>) with n = count, if count is at most `most`, and otherwise with n = 0.
template <int most, class Function>
void with_count(int count, Function function) {
  if constexpr (most > 0) {
    if (count == most) return function(std::integral_constant<int, most>{});
    if (count < most) return with_count<most - 1>(count, function);
  }
  function(std::integral_constant<int, 0>{});
}

// A pack between load and use: on a GPU as words, which stay in registers as they were loaded. Elements of 16 bits
// would be split by the compiler as soon as they arrive, so that each load is waited for.
template <class T, int N>
struct alignas(N == 1 ? alignof(T) : sizeof(T) * N) PackWords {
  using Word = PackWord<T, N>;
  Word words[sizeof(T) * N / sizeof(Word)];
};

__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__host__ __device__ inline float to_float(__half x) { return __half2float(x); }
__host__ __device__ inline float to_float(__nv_fp8_e4m3 x) { return float(x); }
__host__ __device__ inline float to_float(__nv_fp8_e5m2 x) { return float(x); }

template <class T>
__host__ __device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else return __float2half_rn(x);
}

// Returns p[0..N), read in one load. `p` is aligned to N elements.
template <int N, class T>
__device__ inline PackWords<T, N> load_pack(const T* p) {
  return *reinterpret_cast<const PackWords<T, N>*>(p);
}

template <class T, int N>
__device__ inline void store_pack(T* p, const PackWords<T, N>& pack) {
  *reinterpret_cast<PackWords<T, N>*>(p) = pack;
}

template <class T, int N>
__device__ inline void unpack(const PackWords<T, N>& pack, float (&x)[N]) {
  if constexpr (splits_words<T, N>) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) split_word(pack.words[i], x[2 * i], x[2 * i + 1]);
  } else {
    const T* values = reinterpret_cast<const T*>(pack.words);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = to_float(values[k]);
  }
}

// The pack, or zeros.
template <class T, int N>
__device__ inline PackWords<T, N> pack_if(bool condition, const PackWords<T, N>& pack) {
  PackWords<T, N> kept;
#pragma unroll
  for (size_t i = 0; i < sizeof kept / sizeof kept.words[0]; ++i)
    kept.words[i] = condition ? pack.words[i] : typename PackWords<T, N>::Word{};
  return kept;
}

// x rounded to T.
template <class T, int N>
__device__ inline PackWords<T, N> round_pack(const float (&x)[N]) {
  PackWords<T, N> pack;
#pragma unroll
  for (int k = 0; k < N; ++k) reinterpret_cast<T*>(pack.words)[k] = from_float<T>(x[k]);
  return pack;
}

// x[k] = p[k] for k < N, in one load.
template <int N, class T>
__device__ inline void load(const T* p, float (&x)[N]) {
  unpack(load_pack<N>(p), x);
}

// p[k] = x[k] rounded to T, in one store.
template <int N, class T>
__device__ inline void store(T* p, const float (&x)[N]) {
  store_pack(p, round_pack<T>(x));
}

// sum[k] += x[k] for k < N.
template <int N>
__device__ inline void add(float (&sum)[N], const float (&x)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) sum[k] += x[k];
}

// The sum over a row that row_lanes threads share; every thread gets it.
__device__ inline float row_reduce_sum(float value) { return row_lanes == 1 ? value : warp_reduce_sum(value); }

// Sum over a block; every thread gets the result. `scratch`: 32 floats of shared memory that no thread has
// used since the last barrier. blockDim.x is a multiple of 32.
__device__ inline float block_reduce_sum(float value, float* scratch) {
  value = warp_reduce_sum(value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) value += scratch[warp];
  return value;
}
