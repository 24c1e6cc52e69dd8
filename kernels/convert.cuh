// Casts between float and the storage type T, for gradients that are sent to other ranks, and for weights.
//   narrow       out = T(in)                      moves 4 + sizeof(T) bytes per element
//   accumulate   out = in, or out += in           moves 4 + sizeof(T) bytes per element, 4 more when adding
// Elementwise, one pack of floats per thread; counts are multiples of the pack (units are padded).
#pragma once

#include "kernels/device/common.cuh"

constexpr int convert_block = 256;  // threads, one pack each

template <class T>
__global__ void narrow_kernel(T* out, const float* input, size_t count) {
  constexpr int N = pack_width<float>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float x[N];
  load(input + i, x);
  store(out + i, x);
}

template <class T>
__global__ void accumulate_kernel(float* out, const T* input, size_t count, bool add) {
  constexpr int N = pack_width<float>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float x[N], sum[N] = {};
  load(input + i, x);
  if (add) load(out + i, sum);
#pragma unroll
  for (int k = 0; k < N; ++k) sum[k] += x[k];
  store(out + i, sum);
}

inline unsigned convert_grid(size_t count) {
  return unsigned(ceil_div(count, size_t(convert_block * pack_width<float>)));
}

// out (count) = input (count), cast to T.
template <class T>
void narrow(T* out, const float* input, size_t count, cudaStream_t stream) {
  KernelRange range("narrow", stream, (4.0 + sizeof(T)) * count, 0);
  range.writes(out, count);
  narrow_kernel<T><<<convert_grid(count), convert_block, 0, stream>>>(out, input, count);
  CUDA_CHECK(cudaGetLastError());
}

// out (count) = input (count) of type T, or += if `add`.
template <class T>
void accumulate(float* out, const T* input, size_t count, bool add, cudaStream_t stream) {
  KernelRange range("accumulate", stream, (4.0 + sizeof(T) + (add ? 4 : 0)) * count, add ? 1.0 * count : 0);
  range.writes(out, count, add);
  accumulate_kernel<T><<<convert_grid(count), convert_block, 0, stream>>>(out, input, count, add);
  CUDA_CHECK(cudaGetLastError());
}
