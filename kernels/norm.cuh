// The global L2 norm of the gradients and the factor that clips them, without the host ever waiting for either.
//
//   norm = √Σ g²,   factor = min(1, clip / (norm + 1e-6))   (clip 0: factor 1)
//
// A block adds a contiguous chunk of 16,384 floats (64 KB: its packs stay in cache while the threads take turns on a
// CPU), one partial a block; one last block adds the partials in double. Reads 4·n bytes, 2 FLOPs an element.
#pragma once

#include "kernels/common.cuh"

constexpr int norm_chunk = 16384;

__global__ void sum_of_squares_kernel(float* partials, const float* values, size_t count) {
  __shared__ float scratch[32];
  const size_t first = size_t(blockIdx.x) * norm_chunk;
  const size_t last = first + norm_chunk < count ? first + norm_chunk : count;
  float lanes[4] = {}, x[4];
#pragma unroll 4
  for (size_t i = first + threadIdx.x * 4; i + 4 <= last; i += blockDim.x * 4) {
    load(values + i, x);
#pragma unroll
    for (int k = 0; k < 4; ++k) lanes[k] += x[k] * x[k];
  }
  float sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  const size_t tail = last / 4 * 4 + threadIdx.x;  // the last chunk may end inside a pack
  if (tail < last) sum += values[tail] * values[tail];
  sum = block_reduce_sum(sum, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void clip_factor_kernel(float* norm, float* factor, const float* partials, int count, float clip) {
  __shared__ double sums[256];
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (unsigned i = 1; i < blockDim.x; ++i) sum += sums[i];
  *norm = float(sqrt(sum));
  *factor = clip > 0 && *norm + 1e-6f > clip ? clip / (*norm + 1e-6f) : 1.0f;
}

inline int sum_of_squares_partials(size_t count) {
  return int(ceil_div(count, size_t(norm_chunk)));
}

// partials (sum_of_squares_partials(count)) = the sums of squares of values (count), chunk by chunk.
inline void sum_of_squares(float* partials, const float* values, size_t count, cudaStream_t stream) {
  KernelRange range("sum_of_squares", stream, 4.0 * count, 2.0 * count);
  sum_of_squares_kernel<<<sum_of_squares_partials(count), 128, 0, stream>>>(partials, values, count);
  CUDA_CHECK(cudaGetLastError());
}

// *norm and *factor (device memory) from all partials.
inline void clip_factor(float* norm, float* factor, const float* partials, int count, float clip,
                        cudaStream_t stream) {
  KernelRange range("clip_factor", stream, 4.0 * count, count);
  clip_factor_kernel<<<1, 256, 0, stream>>>(norm, factor, partials, count, clip);
  CUDA_CHECK(cudaGetLastError());
}
