// The global L2 norm of the gradients and the factor that clips them. The host waits for neither.
//
//   norm = √Σ g² / S,   factor = min(1, clip / (norm + 1e-6)) / S   (clip 0: 1 / S)
//
// If loss or norm is not finite, or beyond its limit, the factor is left_out (−1), and the optimizer changes nothing.
// The device decides this, from numbers that are the same on all ranks.
//
// S is the loss scale: gradients are taken of S times the loss, so that small ones don't vanish in fp16 (Micikevicius
// et al., arXiv:1710.03740, section 3.2). It is halved when gradients overflow, and doubled after `window` steps
// without overflow, as PyTorch's GradScaler does. fp32 and bf16 need no loss scale: S = 1, window 0.
//
// The gradients may lie in several arrays, and on several ranks. So the caller calls square_sums for each array, add_up
// for all partial sums, adds the totals of all ranks, and calls clip_factor.
//
// Each array makes at most `most_sum_blocks` partial sums (kernels/sums.cuh); one block adds the partial sums of all
// arrays. Reads 4·n bytes; 2 FLOPs per element.
#pragma once

#include "kernels/counts.h"
#include "kernels/sums.cuh"
#include "kernels/update.h"

[[maybe_unused]] static
__global__ void clip_factor_kernel(GradientSummary* summary, const double* total, const float* loss, float clip,
                                   StepLimits limits) {
  LossScale& scale = summary->scale;
  const float norm = float(sqrt(*total) / scale.value);
  const bool finite = isfinite(*loss) && isfinite(norm);
  const float factor = clip > 0 && norm + 1e-6f > clip ? clip / (norm + 1e-6f) : 1.0f;
  summary->norm = norm;
  summary->loss = *loss;
  summary->factor = finite && *loss <= limits.loss && norm <= limits.norm ? factor / scale.value : summary->left_out;
  if (scale.window == 0) return;
  scale.good_steps = finite ? scale.good_steps + 1 : 0;
  if (!finite) scale.value = fmaxf(scale.value / 2, LossScale::least);
  if (scale.good_steps < scale.window) return;
  scale.value = fminf(2 * scale.value, LossScale::most);
  scale.good_steps = 0;
}

// Writes partials (partial_sums<float>(count)), the partial sums of the squares of values (count), one contiguous
// array.
inline void square_sums(float* partials, const float* values, size_t count, cudaStream_t stream) {
  const size_t blocks = partial_sums<float>(count);
  KernelRange range("square_sums", stream, square_sums_counts(double(count)), {{partials, blocks}});
  sum_kernel<double, pack_width<float>>
      <<<unsigned(blocks), sum_block, 0, stream>>>(partials, values, count, false, AddFloats<true>{});
}

// *total (device memory) = Σ partials (count). They are the partial sums of all arrays, one after another.
inline void add_up(double* total, const float* partials, size_t count, cudaStream_t stream) {
  KernelRange range("add_up", stream, {4.0 * count, 1.0 * count});
  sum_kernel<double, 1><<<1, sum_block, 0, stream>>>(total, partials, count, false, AddFloats<false>{});
}

// Computes *summary (norm, factor, and the loss scale of the next step) from *total, the sum of all squares, and *loss.
// All three are in device memory.
inline void clip_factor(GradientSummary* summary, const double* total, const float* loss, float clip,
                        const StepLimits& limits, cudaStream_t stream) {
  KernelRange range("clip_factor", stream, {52, 12}, {{&summary->norm, 1}});
  clip_factor_kernel<<<1, 1, 0, stream>>>(summary, total, loss, clip, limits);
}
