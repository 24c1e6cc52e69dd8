// Softmax and cross-entropy where the ranks share the vocabulary (Megatron-LM: Shoeybi et al., arXiv:1909.08053,
// section 3). Each rank has the logits of its own tokens only, (rows, Vs) of the padded rows of its shard, and the whole
// logits exist nowhere. With J_r the columns of rank r that are tokens:
//
//   maximum_r = max_{v in J_r} z_v;   sum_r = Σ_{v in J_r} exp(z_v − maximum_r);   target_r = z_target if in J_r, else 0
//   maximum = max_r maximum_r;        sum = Σ_r sum_r · exp(maximum_r − maximum);  z_target = Σ_r target_r
//   loss[row] = log(sum) + maximum − z_target;   dz_v = (exp(z_v − maximum) / sum − [v = target]) · weight · S,  v in J_r
//
// The first line, vocabulary_statistics, needs nothing of other ranks. Then the ranks gather its three numbers, 12 bytes
// a row and rank; that is all they send. vocabulary_cross_entropy does the rest. Every rank combines in the order of
// ranks, so all get the same bits. weight and S are those of kernels/cross_entropy.cuh, which does the same for one rank.
//
// Columns from J_r's end to Vs are padding: their values do not matter, and their gradient is 0. A rank may have
// nothing but padding: its maximum is −∞ and its sum 0, so it adds 0.
//
// One block per row, as in kernels/cross_entropy.cuh. Statistics read rows·Vs elements once (a row is kept in shared
// memory between maximum and sum), about 4 FLOPs each. Gradients read and write them once, about 3 FLOPs each.
#pragma once

#include "kernels/cross_entropy.cuh"
#include "kernels/device/part.h"

// Of one row's logits of one rank, or of all ranks.
struct RowStatistics {
  float maximum, sum, target;
};

// If all logits are −∞, which exp(z − maximum) would turn into NaN, the sum is 0. (A NaN among them still shows in it.)
template <class Float, int N, bool KeepRow>
__global__ void __launch_bounds__(long_row_block, 2)
vocabulary_statistics_kernel(RowStatistics* statistics, const Float* logits, const int* targets, VocabularyShard shard,
                             int padded) {
  __shared__ float max_scratch[32], sum_scratch[32];
  extern __shared__ __align__(128) char memory[];
  const Float* row = logits + size_t(blockIdx.x) * padded;
  Float* kept = reinterpret_cast<Float*>(memory);
  const float maximum = row_maximum<Float, N, KeepRow>(row, kept, shard.rows, max_scratch);
  const float base = maximum > -INFINITY ? maximum : 0.0f;
  const float sum = row_sum<Float, N>(row, KeepRow ? kept : row, shard.rows, base, sum_scratch);
  if (threadIdx.x > 0) return;
  const int target = targets[blockIdx.x];
  statistics[blockIdx.x] = {maximum, sum, shard.has(target) ? to_float(row[target - shard.first]) : 0.0f};
}

// Combines what the ranks have found of each row, and leaves it where the first rank's was. One thread per row.
[[maybe_unused]] static
__global__ void combine_statistics_kernel(float* losses, RowStatistics* all, int ranks, int rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  RowStatistics total = {-INFINITY, 0, 0};
  for (int rank = 0; rank < ranks; ++rank) {
    const float maximum = all[size_t(rank) * rows + row].maximum;
    total.maximum = maximum > total.maximum ? maximum : total.maximum;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const RowStatistics part = all[size_t(rank) * rows + row];
    total.sum += part.sum * expf(part.maximum - total.maximum);
    total.target += part.target;
  }
  losses[row] = logf(total.sum) + (total.maximum - total.target);
  all[row] = total;
}

template <class Float, int N>
__global__ void __launch_bounds__(long_row_block, 2)
vocabulary_gradient_kernel(Float* logits, const RowStatistics* totals, const int* targets, VocabularyShard shard,
                           int padded, float weight, const float* loss_scale) {
  Float* row = logits + size_t(blockIdx.x) * padded;
  const RowStatistics total = totals[blockIdx.x];
  const int target = targets[blockIdx.x], column = shard.has(target) ? target - shard.first : -1;
  write_gradient<Float, N>(row, row, shard.rows, padded, column, total.maximum, total.sum, weight * *loss_scale);
}

// statistics (rows) of this rank's logits (rows, Vs). targets (rows) token ids below V, of any rank's shard. Vs, here
// `padded`, is a multiple of the pack width.
template <class Float>
void vocabulary_statistics(RowStatistics* statistics, const Float* logits, const int* targets, int rows,
                           VocabularyShard shard, int padded, cudaStream_t stream) {
  KernelRange range("vocabulary_statistics", stream, double(rows) * (padded * sizeof(Float) + sizeof(RowStatistics)),
                    4.0 * rows * padded);
  range.writes(&statistics->maximum, 3 * size_t(rows));
  with_kept_row<Float>(shard.rows, [&](auto keep, int row_bytes) {
    const auto kernel = vocabulary_statistics_kernel<Float, pack_width<Float>, decltype(keep)::value>;
    allow_shared_memory(kernel, row_bytes);
    kernel<<<rows, row_threads<Float>(padded), row_bytes, stream>>>(statistics, logits, targets, shard, padded);
  });
  CUDA_CHECK(cudaGetLastError());
}

// all (ranks, rows): the statistics of every rank; the first `rows` are overwritten. losses (rows) float, the same on all
// ranks. If `write_gradient`, this rank's logits (rows, Vs) are overwritten by their gradients. *total_loss += weight ·
// Σ losses, unless total_loss is null.
template <class Float>
void vocabulary_cross_entropy(Float* logits, float* losses, float* total_loss, RowStatistics* all, int ranks,
                              const int* targets, int rows, VocabularyShard shard, int padded, float weight,
                              const float* loss_scale, bool write_gradient, cudaStream_t stream) {
  KernelRange range("vocabulary_cross_entropy", stream,
                    (write_gradient ? 2.0 * padded * sizeof(Float) : 0) * rows + double(ranks) * rows * sizeof(RowStatistics),
                    (write_gradient ? 3.0 : 0) * rows * padded);
  range.writes(losses, rows);
  if (write_gradient) range.writes(logits, size_t(rows) * padded);
  combine_statistics_kernel<<<ceil_div(rows, 128), 128, 0, stream>>>(losses, all, ranks, rows);
  if (write_gradient)
    vocabulary_gradient_kernel<Float, pack_width<Float>><<<rows, row_threads<Float>(padded), 0, stream>>>(
        logits, all, targets, shard, padded, weight, loss_scale);
  if (total_loss) sum_losses_kernel<<<1, 256, 0, stream>>>(total_loss, losses, rows, weight);
  CUDA_CHECK(cudaGetLastError());
}
