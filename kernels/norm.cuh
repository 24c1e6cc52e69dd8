// The global L2 norm of the gradients and the factor that clips them. The host waits for neither.
//
//   norm = √Σ g² / S,   factor = min(1, clip / (norm + 1e-6)) / S   (clip 0: 1 / S)
//
// If loss or norm is not finite, or beyond its limit, the factor is left_out (−1), and the optimizer changes nothing.
// The device decides this, from numbers that are the same on all ranks.
//
// S is the loss scale: gradients are those of S times the loss, so that small ones don't vanish in fp16 (Micikevicius
// et al., arXiv:1710.03740, section 3.2). It is halved when gradients overflow, and doubled after `window` steps
// without overflow, as PyTorch's GradScaler does. fp32 and bf16 need no loss scale: S = 1, window 0.
//
// The gradients may lie in several arrays, and on several ranks. So the caller calls square_sums for each array, add_up
// for all partial sums, adds the totals of all ranks, and calls clip_factor.
//
// A tree: each thread adds eight packs, which lie a block's width apart, and writes one partial sum. Partial sums are
// added in the same way until few are left, which one block adds in double. Only that last level has barriers.
// Reads 4·n bytes (and a thirty-second of that again); 2 FLOPs per element.
#pragma once

#include "kernels/device/common.cuh"
#include "kernels/update.h"

constexpr int norm_block = 256, norm_packs = 8;
constexpr int norm_fan_in = norm_packs * pack_width<float>;  // floats that one thread adds
constexpr size_t norm_last_level = 4096;                     // the last block adds at most so many partial sums

// Σ f(x) of the thread's eight packs, f(x) = x² or x. All loads are issued before the first is used. What is behind the
// last whole pack is added by the first threads of the last block.
template <bool Square>
__device__ inline float thread_sum(const float* values, size_t count) {
  constexpr int N = pack_width<float>;
  const auto f = [](float x) { return Square ? x * x : x; };
  const size_t whole = count / N * N;
  size_t i = size_t(blockIdx.x) * norm_block * norm_fan_in + threadIdx.x * N;
  float sum = 0, sum_of_element[N] = {}, x[N];  // sum_of_element[k]: over element k of the packs
  PackWords<float, N> packs[norm_packs] = {};
#pragma unroll
  for (int pack = 0; pack < norm_packs; ++pack, i += norm_block * N)
    if (i < whole) packs[pack] = load_pack<N>(values + i);
  const size_t single = whole + threadIdx.x;
  if (blockIdx.x == gridDim.x - 1 && single < count) sum = f(values[single]);
#pragma unroll
  for (int pack = 0; pack < norm_packs; ++pack) {
    unpack(packs[pack], x);
#pragma unroll
    for (int k = 0; k < N; ++k) sum_of_element[k] += f(x[k]);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) sum += sum_of_element[k];
  return sum;
}

template <bool Square>
__global__ void partial_sums_kernel(float* sums, const float* values, size_t count) {
  sums[size_t(blockIdx.x) * norm_block + threadIdx.x] = thread_sum<Square>(values, count);
}

// *total = Σ values, in double.
[[maybe_unused]] static
__global__ void last_sum_kernel(double* total, const float* values, int count) {
  __shared__ double sums[norm_block];
  double sum = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += norm_block) sum += values[i];
  sums[threadIdx.x] = sum;
  for (unsigned half = norm_block / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *total = sums[0];
}

[[maybe_unused]] static
__global__ void clip_factor_kernel(GradientSummary* summary, const double* total, const float* loss, float clip,
                                   StepLimits limits) {
  LossScale& scale = summary->scale;
  const float norm = float(sqrt(*total) / scale.value);
  const bool finite = isfinite(*loss) && isfinite(norm);
  const float factor = clip > 0 && norm + 1e-6f > clip ? clip / (norm + 1e-6f) : 1.0f;
  summary->norm = norm;
  summary->factor = finite && *loss <= limits.loss && norm <= limits.norm ? factor / scale.value : summary->left_out;
  if (scale.window == 0) return;
  scale.good_steps = finite ? scale.good_steps + 1 : 0;
  if (!finite) scale.value = fmaxf(scale.value / 2, LossScale::least);
  if (scale.good_steps < scale.window) return;
  scale.value = fminf(2 * scale.value, LossScale::most);
  scale.good_steps = 0;
}

// The number of partial sums that one level makes of `count` values.
inline size_t norm_partials(size_t count) {
  return ceil_div(count, size_t(norm_block * norm_fan_in)) * norm_block;
}

// Floats of workspace that add_up needs for `count` partial sums, all levels together.
inline size_t norm_workspace(size_t count) {
  size_t floats = 0;
  while (count > norm_last_level) floats += count = norm_partials(count);
  return floats;
}

// Writes partials (norm_partials(count)), the partial sums of the squares of values (count), one contiguous array.
inline void square_sums(float* partials, const float* values, size_t count, cudaStream_t stream) {
  KernelRange range("square_sums", stream, 4.0 * count, 2.0 * count);
  range.writes(partials, norm_partials(count));
  partial_sums_kernel<true><<<unsigned(norm_partials(count) / norm_block), norm_block, 0, stream>>>(partials, values, count);
  CUDA_CHECK(cudaGetLastError());
}

// *total (device memory) = Σ partials (count). They are the partial sums of all arrays, one after another.
inline void add_up(double* total, const float* partials, size_t count, float* workspace, cudaStream_t stream) {
  KernelRange range("add_up", stream, 4.0 * count, 1.0 * count);
  while (count > norm_last_level) {
    const size_t fewer = norm_partials(count);
    partial_sums_kernel<false><<<unsigned(fewer / norm_block), norm_block, 0, stream>>>(workspace, partials, count);
    partials = workspace;
    workspace += fewer;
    count = fewer;
  }
  last_sum_kernel<<<1, norm_block, 0, stream>>>(total, partials, int(count));
  CUDA_CHECK(cudaGetLastError());
}

// Computes *summary (norm, factor, and the loss scale of the next step) from *total, the sum of all squares, and *loss.
// All three are in device memory.
inline void clip_factor(GradientSummary* summary, const double* total, const float* loss, float clip,
                        const StepLimits& limits, cudaStream_t stream) {
  KernelRange range("clip_factor", stream, 48, 12);
  range.writes(&summary->norm, 1);
  clip_factor_kernel<<<1, 1, 0, stream>>>(summary, total, loss, clip, limits);
  CUDA_CHECK(cudaGetLastError());
}
