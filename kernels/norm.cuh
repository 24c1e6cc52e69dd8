// The global L2 norm of the gradients and the factor that clips them, without the host ever waiting for either.
//
//   norm = √Σ g²,   factor = min(1, clip / (norm + 1e-6))   (clip 0: factor 1)
//
// A tree: each thread adds eight packs, a block's width apart, and writes one partial sum; partial sums are added the
// same way until few are left, which one block adds in double. No thread ever waits for another in the big levels.
// Reads 4·n bytes (and a thirty-second of it again), 2 FLOPs an element.
#pragma once

#include "kernels/common.cuh"

constexpr int norm_block = 256, norm_packs = 8;
constexpr int norm_fan_in = norm_packs * pack_width<float>;  // floats a thread
constexpr size_t norm_last_level = 4096;                     // partial sums that the last block adds

// sums[thread] = Σ f(x) of the thread's eight packs, f(x) = x² or x.
template <bool Square>
__global__ void partial_sums_kernel(float* sums, const float* values, size_t count) {
  constexpr int N = pack_width<float>;
  const size_t first = size_t(blockIdx.x) * norm_block * norm_fan_in + threadIdx.x * N;
  float lanes[N] = {}, x[N];
#pragma unroll
  for (int pack = 0; pack < norm_packs; ++pack) {
    const size_t i = first + size_t(pack) * norm_block * N;
    if (i + N <= count) {
      load(values + i, x);
    } else {
      for (int k = 0; k < N; ++k) x[k] = i + k < count ? values[i + k] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) lanes[k] += Square ? x[k] * x[k] : x[k];
  }
  float sum = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) sum += lanes[k];
  sums[size_t(blockIdx.x) * norm_block + threadIdx.x] = sum;
}

__global__ void clip_factor_kernel(float* norm, float* factor, const float* partials, int count, float clip) {
  __shared__ double sums[norm_block];
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (unsigned i = 1; i < blockDim.x; ++i) sum += sums[i];
  *norm = float(sqrt(sum));
  *factor = clip > 0 && *norm + 1e-6f > clip ? clip / (*norm + 1e-6f) : 1.0f;
}

// Partial sums that one level leaves of `count` values.
inline size_t norm_partials(size_t count) {
  return ceil_div(count, size_t(norm_block * norm_fan_in)) * norm_block;
}

// Floats of workspace for gradient_norm: all levels.
inline size_t norm_workspace(size_t count) {
  size_t floats = 0;
  do floats += count = norm_partials(count);
  while (count > norm_last_level);
  return floats;
}

// *norm and *factor (device memory) of values (count).
inline void gradient_norm(float* norm, float* factor, const float* values, size_t count, float clip, float* workspace,
                          cudaStream_t stream) {
  KernelRange range("gradient_norm", stream, 4.0 * count, 2.0 * count);
  size_t sums = norm_partials(count);
  partial_sums_kernel<true><<<unsigned(sums / norm_block), norm_block, 0, stream>>>(workspace, values, count);
  while (sums > norm_last_level) {
    const size_t fewer = norm_partials(sums);
    partial_sums_kernel<false><<<unsigned(fewer / norm_block), norm_block, 0, stream>>>(workspace + sums, workspace, sums);
    workspace += sums;
    sums = fewer;
  }
  clip_factor_kernel<<<1, norm_block, 0, stream>>>(norm, factor, workspace, int(sums), clip);
  CUDA_CHECK(cudaGetLastError());
}
