// Softmax and cross-entropy over the padded vocabulary, forward and backward in one kernel.
//
//   loss[row] = log Σ_v exp(z_v) − z_target;   dz_v = (softmax(z)_v − [v = target]) · weight · S,   v < V
// Columns V to Vs−1 are padding: their values do not matter, and their gradient is 0. `weight` is the weight of one token's
// loss in the loss of the step, 1 / (tokens of the global batch). S is the loss scale (kernels/norm.cuh), in device
// memory.
//
// One block per row (on the CPU device one thread, if the row is short), two passes over it: the sum of exponentials, then
// the gradient, which overwrites the logits. Where a row fits into shared memory, device memory is read and written once.
// Exponentials are to base 2, and the sum's exponent K grows with the largest element so far (Milakov, Gimelshein,
// arXiv:1805.02867):
//
//   Σ_v exp(z_v) = sum · 2^K;   p_v = 2^(c·z_v − K) / sum;   loss = ln(sum) − ln 2 · (c·z_target − K),   c = log2(e)
//
// c·z − K is one instruction with one rounding, whatever K is. K, which is c·m of the largest element m, is rounded too, and
// the sum and all its terms are 2^(c·m − K) times what they would be with the exact one. From |m| = 2^30 on that would be
// 2^64 and more, and soon more than a float holds. But there two logits near m are equal or at least 64 apart, and e^−64 is
// negligible against 1. So any base above 1 is as right, and with c = 2, K and c·z − K are exact:
//
//   loss = ln(sum) − (z_target − K/2)
//
// K still grows with m, so one rule says which sum has the larger element. Where 2·m is not finite, the loss is NaN.
//
// The first pass keeps the row in shared memory if it fits (50,257 logits of 16 bits do, 98 KB). The rows of all blocks
// that run at once are larger than the L2 cache, so without this the second pass would read device memory again. A
// thread reads only the packs that it has stored itself, so this needs no barrier. Reads and writes rows·Vs elements
// once; about 6 FLOPs per element. Besides memory, its limit is the issue of instructions, some 100 for 8 logits.
#pragma once

#include <algorithm>
#include <cfloat>

#include "kernels/counts.h"
#include "kernels/sums.cuh"

// The shared memory that a block can have on every GPU of compute capability 8.0 or later, less some for the
// reductions. On Hopper two blocks share an SM.
constexpr int kept_row_bytes = 98 * 1024 + 512;

constexpr float ln_2 = 0.6931471805599453f;

// Σ exp(z) = sum · 2^exponent, of the elements so far. No element: the exponent is below all others, but finite, so
// that no difference is NaN.
struct ExponentialSum {
  float exponent = -FLT_MAX, sum = 0;

  __device__ bool is_exact() const { return fabsf(exponent) >= 0x1p31f; }
  __device__ float factor() const { return is_exact() ? 2.0f : log2_e; }
};

// Calls function(column, pack) for the thread's packs of row[0, end), the whole block's width apart. Several are loaded
// before the first is used.
template <int N, class Float, class Function>
__device__ inline void for_each_pack(const Float* row, int end, Function function) {
  const int step = blockDim.x * N;
  int column = threadIdx.x * N;
  for (; column + (packs_at_once - 1) * step < end; column += packs_at_once * step) {
    PackWords<Float, N> packs[packs_at_once];
#pragma unroll
    for (int r = 0; r < packs_at_once; ++r) packs[r] = load_pack<N>(row + column + r * step);
#pragma unroll
    for (int r = 0; r < packs_at_once; ++r) function(column + r * step, packs[r]);
  }
#pragma unroll 1
  for (; column < end; column += step) function(column, load_pack<N>(row + column));
}

// Does this thread read and write the pack with that column?
template <int N>
__device__ inline bool has_column(int column) {
  return column >= 0 && column / N % blockDim.x == threadIdx.x;
}

// The sum over the block, in a fixed order; every thread gets it.
__device__ inline ExponentialSum block_sum(ExponentialSum part, ExponentialSum (&scratch)[32]) {
  if (row_lanes == 1 && blockDim.x == 1) return part;
  const auto reduce_warp = [](ExponentialSum of_lane) -> ExponentialSum {
    const float exponent = warp_reduce_max(of_lane.exponent);
    return {exponent, warp_reduce_sum(of_lane.sum * exp2_approximate(of_lane.exponent - exponent))};
  };
  part = reduce_warp(part);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = part;
  __syncthreads();
  return reduce_warp(threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : ExponentialSum{});
}

// The first pass over a row of `count` logits, by one block: their sum. If KeepRow, copies their packs to `kept`. The
// last pack may end in padding.
template <class Float, int N, bool KeepRow>
__device__ inline ExponentialSum row_sum(const Float* row, Float* kept, int count, ExponentialSum (&scratch)[32]) {
  ExponentialSum part;
  float factor = log2_e;
  const auto add = [&](int column, const PackWords<Float, N>& pack) {
    if constexpr (KeepRow) store_pack(kept + column, pack);
    float x[N];
    unpack(pack, x);
    const float found = largest(x), factor_of_found = fabsf(found) >= 0x1p30f ? 2.0f : log2_e, exponent = factor_of_found * found;
    if (exponent > part.exponent) {
      part.sum *= exp2_approximate(part.exponent - exponent);
      part.exponent = exponent;
      factor = factor_of_found;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = fmaf(factor, x[k], -part.exponent);
    exp2_pack(x);
#pragma unroll
    for (int k = 0; k < N; ++k) part.sum += x[k];
  };
  const int whole = count / N * N;
  for_each_pack<N>(row, whole, add);
  if (whole < count && has_column<N>(whole)) {
    float x[N];
    load(row + whole, x);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = whole + k < count ? x[k] : -INFINITY;
    add(whole, round_pack<Float>(x));
  }
  return block_sum(part, scratch);
}

// The second pass: row = (exp(z) / total − [column = target]) · at_target, and 0 in the padding. `target` is none of
// the columns if it is negative. The logits' packs are read from `kept`, which may be the row.
template <class Float, int N>
__device__ inline void write_gradient(Float* row, const Float* kept, int count, int padded, int target,
                                      const ExponentialSum& total, float at_target) {
  const float scale = at_target / total.sum, factor = total.factor();
  const bool has_target = has_column<N>(target);
  const float target_logit = has_target ? to_float(row[target]) : 0.0f;
  const auto write = [&](int column, const PackWords<Float, N>& pack) {
    float x[N];
    unpack(pack, x);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = fmaf(factor, x[k], -total.exponent);
    exp2_pack(x);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] *= scale;
    store(row + column, x);
  };
  const int whole = count / N * N;
  for_each_pack<N>(kept, whole, write);
  if (whole < count && has_column<N>(whole)) {
    write(whole, load_pack<N>(kept + whole));
    for (int column = count; column < whole + N; ++column) row[column] = from_float<Float>(0);
  }
  if (has_target)
    row[target] = from_float<Float>(exp2_approximate(fmaf(factor, target_logit, -total.exponent)) * scale - at_target);
  const float zeros[N] = {};
  for (int column = round_up(count, N) + threadIdx.x * N; column < padded; column += blockDim.x * N)
    store(row + column, zeros);
}

// −ln of a token's probability.
__device__ inline float token_loss(const ExponentialSum& total, float logit) {
  if (total.sum == 0) return NAN;
  const float distance = total.is_exact() ? logit - total.exponent / 2 : ln_2 * fmaf(log2_e, logit, -total.exponent);
  return logf(total.sum) - distance;
}

template <class Float, int N, bool WriteGradient, bool KeepRow>
__global__ void __launch_bounds__(long_row_block, 2)
cross_entropy_kernel(Float* logits, float* losses, const int* targets, int vocabulary, int padded, float weight,
                     const float* loss_scale) {
  __shared__ ExponentialSum scratch[32];
  extern __shared__ __align__(128) char memory[];
  Float *row = logits + size_t(blockIdx.x) * padded, *kept = KeepRow ? reinterpret_cast<Float*>(memory) : row;
  const int target = targets[blockIdx.x];
  const ExponentialSum total = row_sum<Float, N, KeepRow>(row, kept, vocabulary, scratch);
  if (has_column<N>(target)) losses[blockIdx.x] = token_loss(total, to_float(row[target]));
  if constexpr (WriteGradient)
    write_gradient<Float, N>(row, kept, vocabulary, padded, target, total, weight * *loss_scale);
}

// *total += scale · Σ losses (rows).
inline void add_losses(float* total, const float* losses, int rows, float scale, cudaStream_t stream) {
  sum_kernel<double, pack_width<float>>
      <<<1, sum_block, 0, stream>>>(total, losses, size_t(rows), true, AddFloats<false>{scale});
}

// The threads of a block for a row. (One thread adds up in order: over more logits its sum would lose digits.)
template <class Float>
int row_threads(int padded) {
  return row_lanes == 1 && padded <= 2048 ? 1 : std::clamp(round_up(padded / pack_width<Float>, 32), 32, long_row_block);
}

template <class Float, bool WriteGradient>
void launch_cross_entropy(Float* logits, float* losses, const int* targets, int rows, int vocabulary, int padded,
                          float weight, const float* loss_scale, cudaStream_t stream) {
  constexpr int N = pack_width<Float>;
  const auto launch = [&](auto keeps_row, int bytes) {
    allow_shared_memory(cross_entropy_kernel<Float, N, WriteGradient, keeps_row>, bytes);
    cross_entropy_kernel<Float, N, WriteGradient, keeps_row><<<rows, row_threads<Float>(padded), bytes, stream>>>(
        logits, losses, targets, vocabulary, padded, weight, loss_scale);
  };
  const int row_bytes = round_up(vocabulary, N) * int(sizeof(Float));
  if (row_bytes <= kept_row_bytes) launch(std::true_type{}, row_bytes);
  else launch(std::false_type{}, 0);
}

// logits (rows, Vs) in Float are overwritten by their gradients, unless `write_gradient` is false. losses (rows) float,
// targets (rows) token ids below V. Vs is a multiple of the pack width. *total_loss += weight · Σ losses.
template <class Float>
void cross_entropy(Float* logits, float* losses, float* total_loss, const int* targets, int rows, int vocabulary,
                   int padded, float weight, const float* loss_scale, bool write_gradient, cudaStream_t stream) {
  const size_t count = size_t(rows) * padded;
  KernelRange range("cross_entropy", stream, cross_entropy_counts(double(count), sizeof(Float), write_gradient),
                    {{losses, size_t(rows)}});
  if (write_gradient) range.writes(logits, count);
  const auto launch = write_gradient ? launch_cross_entropy<Float, true> : launch_cross_entropy<Float, false>;
  launch(logits, losses, targets, rows, vocabulary, padded, weight, loss_scale, stream);
  add_losses(total_loss, losses, rows, weight, stream);
}
