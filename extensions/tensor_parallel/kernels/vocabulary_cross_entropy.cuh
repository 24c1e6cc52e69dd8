// Softmax and cross-entropy where the ranks share the vocabulary (Megatron-LM: Shoeybi et al., arXiv:1909.08053,
// section 3). Each rank has the logits of its own tokens only, (rows, Vs) of the padded rows of its shard, and the
// whole logits exist nowhere. With J_r the columns of rank r that are tokens, and c = log2(e):
//
//   Σ_{v in J_r} exp(z_v) = sum_r · 2^K_r;   target_r = z_target if in J_r, else 0
//   K = max_r K_r;   sum = Σ_r sum_r · 2^(K_r − K);   z_target = Σ_r target_r
//   loss[row] = ln(sum) − ln 2 · (c·z_target − K)
//   dz_v = (2^(c·z_v − K) / sum − [v = target]) · weight · S,  v in J_r
//
// The first line, vocabulary_statistics, needs nothing of other ranks. Then the ranks gather its three numbers, 12
// bytes a row and rank; that is all they send. vocabulary_cross_entropy does the rest. Every rank combines in the order
// of ranks, so all get the same bits. weight and S are as in kernels/cross_entropy.cuh, which does the same for one
// rank.
//
// Columns from J_r's end to Vs are padding: their values do not matter, and their gradient is 0. A rank may have
// nothing but padding: its sum is 0.
//
// One block per row, as in kernels/cross_entropy.cuh. Statistics read rows·Vs elements once, about 4 FLOPs each.
// Gradients read and write them once, about 3 FLOPs each.
#pragma once

#include "kernels/cross_entropy.cuh"
#include "kernels/device/part.h"

// Of one row's logits of one rank, or of all ranks.
struct RowStatistics {
  ExponentialSum exponentials;
  float target;
};

template <class Float, int N>
__global__ void __launch_bounds__(long_row_block, 2)
vocabulary_statistics_kernel(RowStatistics* statistics, const Float* logits, const int* targets, VocabularyShard shard,
                             int padded) {
  __shared__ ExponentialSum scratch[32];
  const Float* row = logits + size_t(blockIdx.x) * padded;
  const ExponentialSum total = row_sum<Float, N, false>(row, nullptr, shard.rows, scratch);
  if (threadIdx.x > 0) return;
  const int target = targets[blockIdx.x];
  statistics[blockIdx.x] = {total, shard.has(target) ? to_float(row[target - shard.first]) : 0.0f};
}

// Combines the ranks' statistics of each row, and leaves the result where the first rank's were. One thread per row.
[[maybe_unused]] static
__global__ void combine_statistics_kernel(float* losses, RowStatistics* all, int ranks, int rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  RowStatistics total = {};
  for (int rank = 0; rank < ranks; ++rank)
    total.exponentials.exponent = larger(all[size_t(rank) * rows + row].exponentials.exponent, total.exponentials.exponent);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto [part, target] = all[size_t(rank) * rows + row];
    total.exponentials.sum += part.sum * exp2_approximate(part.exponent - total.exponentials.exponent);
    total.target += target;
  }
  losses[row] = token_loss(total.exponentials, total.target);
  all[row] = total;
}

template <class Float, int N>
__global__ void __launch_bounds__(long_row_block, 2)
vocabulary_gradient_kernel(Float* logits, const RowStatistics* totals, const int* targets, VocabularyShard shard,
                           int padded, float weight, const float* loss_scale) {
  Float* row = logits + size_t(blockIdx.x) * padded;
  const RowStatistics total = totals[blockIdx.x];
  const int target = targets[blockIdx.x], column = shard.has(target) ? target - shard.first : -1;
  write_gradient<Float, N>(row, row, shard.rows, padded, column, total.exponentials,
                           weight * *loss_scale);
}

// statistics (rows) of this rank's logits (rows, Vs). targets (rows) token ids below V, of any rank's shard. Vs, here
// `padded`, is a multiple of the pack width.
template <class Float>
void vocabulary_statistics(RowStatistics* statistics, const Float* logits, const int* targets, int rows,
                           VocabularyShard shard, int padded, cudaStream_t stream) {
  KernelRange range("vocabulary_statistics", stream,
                    {double(rows) * (padded * sizeof(Float) + sizeof(RowStatistics)), 4.0 * rows * padded},
                    {{&statistics->exponentials.exponent, 3 * size_t(rows)}});
  vocabulary_statistics_kernel<Float, pack_width<Float>>
      <<<rows, row_threads<Float>(padded), 0, stream>>>(statistics, logits, targets, shard, padded);
}

// all (ranks, rows): the statistics of every rank; the first `rows` are overwritten. losses (rows) float, the same on
// all ranks. If `write_gradient`, this rank's logits (rows, Vs) are overwritten by their gradients. *total_loss +=
// weight · Σ losses, unless total_loss is null.
template <class Float>
void vocabulary_cross_entropy(Float* logits, float* losses, float* total_loss, RowStatistics* all, int ranks,
                              const int* targets, int rows, VocabularyShard shard, int padded, float weight,
                              const float* loss_scale, bool write_gradient, cudaStream_t stream) {
  KernelRange range("vocabulary_cross_entropy", stream,
                    {(write_gradient ? 2.0 * padded * sizeof(Float) : 0) * rows + double(ranks) * rows * sizeof(RowStatistics),
                     (write_gradient ? 3.0 : 0) * rows * padded}, {{losses, size_t(rows)}});
  if (write_gradient) range.writes(logits, size_t(rows) * padded);
  combine_statistics_kernel<<<ceil_div(rows, 128), 128, 0, stream>>>(losses, all, ranks, rows);
  if (write_gradient)
    vocabulary_gradient_kernel<Float, pack_width<Float>><<<rows, row_threads<Float>(padded), 0, stream>>>(
        logits, all, targets, shard, padded, weight, loss_scale);
  if (total_loss) add_losses(total_loss, losses, rows, weight, stream);
}
