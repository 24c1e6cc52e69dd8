// LayerNorm over C channels (Ba, Kiros, Hinton, arXiv:1607.06450), fused with the residual addition before it.
//
//   forward:   sum = stream + branch, rounded to the storage type;  mean, rstd = 1/√(var + ε) over sum's C channels
//              out = (sum − mean)·rstd·weight + bias
//   backward:  with n = (sum − mean)·rstd and g = dout·weight,
//              dsum += rstd·(g − mean_C(g) − n·mean_C(g·n));  dweight = Σ_rows dout·n;  dbias = Σ_rows dout
//
// Forward: one warp per row, so that only shuffles are needed (on the CPU device one thread: row_lanes). A lane keeps its
// packs of the row in registers, and loads all of them before it uses the first. The variance takes a second pass over
// them (Σx² − mean² in one pass would lose digits by cancellation). Rows of more than row_lanes·kept_packs packs (on a
// GPU 2,048 channels in 16 bits) are read anew in each pass, from cache. Moves 4 elements per channel and row: reads
// stream and branch, writes sum and out.
// Backward: at most 512 blocks (with long rows more), each for a run of rows. Each thread owns a pack of columns, and
// sums its part of dweight and dbias in registers without atomics. The block works on two rows, which it keeps in
// registers, while it loads the next two: it computes both means of each row, then updates dsum. Moves 4 elements per
// channel and row: reads dout, sum and dsum, writes dsum; the partial sums of dweight and dbias are a 1/32 of that or
// less. Rows of more packs than kept_row_block (on a GPU 4,096 channels in 16 bits, on the CPU device all) are read twice,
// mostly from cache: first by one warp per row for the means, then by columns. Kept by threads of two packs each, they would spill
// registers: nvcc 13 stores 1,172 bytes for 16 bits, and 140 for floats.
#pragma once

#include <algorithm>

#include "kernels/column_sum.cuh"
#include "kernels/counts.h"
#include "kernels/device/common.cuh"
#include "kernels/device/maximum.cuh"

constexpr float layernorm_epsilon = 1e-5f;
constexpr int layernorm_rows_per_block = 32;  // backward: at least this number
constexpr int layernorm_most_blocks = 512;    // backward: a wave of them, or less, on GPUs of 108 to 132 multiprocessors
constexpr int layernorm_rows_at_once = 2;     // backward: more rows mean more loads in flight, but more registers

// The inputs and results of forward for one row; `branch` may be null.
template <class Float>
struct LayerNormRow {
  Float *out, *sum;
  const Float *stream_rows, *branch, *weight, *bias;
  int channels;
};

// sum[c...] = x[...] = stream_rows + branch, rounded; without a branch x = stream_rows.
template <class Float, int N>
__device__ inline void add_branch(const LayerNormRow<Float>& row, int c, const PackWords<Float, N>& stream_rows,
                                  const PackWords<Float, N>& branch, float (&x)[N]) {
  unpack(stream_rows, x);
  if (!row.branch) return;
  float y[N];
  unpack(branch, y);
  add(x, y);
  const PackWords<Float, N> rounded = round_pack<Float>(x);
  store_pack(row.sum + c, rounded);
  unpack(rounded, x);
}

// out[c...] = (x − mean)·rstd·weight + bias
template <class Float, int N, class Seen>
__device__ inline void write_normed(const LayerNormRow<Float>& row, int c, const float (&x)[N], float mean, float rstd,
                                    Seen& seen) {
  float w[N], b[N];
  load(row.weight + c, w);
  load(row.bias + c, b);
#pragma unroll
  for (int k = 0; k < N; ++k) w[k] = (x[k] - mean) * rstd * w[k] + b[k];
  store(row.out + c, w);
  seen.see(w);
}

struct MeanAndRstd {
  float mean, rstd;
};

__device__ inline float rstd_of(float squared_deviations, int channels) {
  return 1.0f / sqrtf(row_reduce_sum(squared_deviations) / channels + layernorm_epsilon);
}

// One row by one warp; a lane has at most `packs` packs of it. Lanes that have fewer load weights instead: another
// lane's pack of the row may be written meanwhile, where sum is stream_rows.
template <int packs, int N, class Float, class Seen>
__device__ inline MeanAndRstd normalise_kept_row(const LayerNormRow<Float>& row, Seen& seen) {
  const int first = threadIdx.x % row_lanes * N, step = row_lanes * N;
  PackWords<Float, N> stream_rows[packs] = {}, branch[packs] = {};
  float x[packs][N] = {}, sum = 0, squares = 0;
#pragma unroll
  for (int p = 0; p < packs; ++p) {
    const int c = first + p * step;
    stream_rows[p] = load_pack<N>(c < row.channels ? row.stream_rows + c : row.weight);
    if (row.branch) branch[p] = load_pack<N>(c < row.channels ? row.branch + c : row.weight);
  }
#pragma unroll
  for (int p = 0; p < packs; ++p)
    if (first + p * step < row.channels) {
      add_branch(row, first + p * step, stream_rows[p], branch[p], x[p]);
#pragma unroll
      for (int k = 0; k < N; ++k) sum += x[p][k];
    }
  const float mean = row_reduce_sum(sum) / row.channels;
#pragma unroll
  for (int p = 0; p < packs; ++p)
    if (first + p * step < row.channels)
#pragma unroll
      for (int k = 0; k < N; ++k) squares += (x[p][k] - mean) * (x[p][k] - mean);
  const float rstd = rstd_of(squares, row.channels);
#pragma unroll
  for (int p = 0; p < packs; ++p)
    if (first + p * step < row.channels) write_normed(row, first + p * step, x[p], mean, rstd, seen);
  return {mean, rstd};
}

// The same for rows of any length. One thread alone reads the row once more for its sum: so the compiler orders that in one way,
// with a branch and without (a row that is computed again, for backward, has none).
template <int N, class Float, class Seen>
__device__ inline MeanAndRstd normalise_long_row(const LayerNormRow<Float>& row, Seen& seen) {
  const int first = threadIdx.x % row_lanes * N, step = row_lanes * N;
  const Float* normed = row.branch ? row.sum : row.stream_rows;  // no barrier: a lane reads only what it wrote itself
  float x[N], sum = 0, squares = 0;
  for (int c = first; c < row.channels; c += step) {
    add_branch(row, c, load_pack<N>(row.stream_rows + c), load_pack<N>((row.branch ? row.branch : row.stream_rows) + c), x);
#pragma unroll
    for (int k = 0; row_lanes > 1 && k < N; ++k) sum += x[k];
  }
  for (int c = row_lanes > 1 ? row.channels : first; c < row.channels; c += step) {
    load(normed + c, x);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += x[k];
  }
  const float mean = row_reduce_sum(sum) / row.channels;
  for (int c = first; c < row.channels; c += step) {
    load(normed + c, x);
#pragma unroll
    for (int k = 0; k < N; ++k) squares += (x[k] - mean) * (x[k] - mean);
  }
  const float rstd = rstd_of(squares, row.channels);
  for (int c = first; c < row.channels; c += step) {
    load(normed + c, x);
    write_normed(row, c, x, mean, rstd, seen);
  }
  return {mean, rstd};
}

// packs: of a lane that it keeps; 0: any number.
template <class Float, int N, int packs, class Seen>
__global__ void residual_layernorm_forward_kernel(Float* out, Float* sum_out, float* means, float* rstds,
                                                  const Float* stream_rows, const Float* branch, const Float* weight,
                                                  const Float* bias, int rows, int channels, Seen seen) {
  const int number = int((size_t(blockIdx.x) * blockDim.x + threadIdx.x) / row_lanes);
  if (number >= rows) return;
  const size_t offset = size_t(number) * channels;
  const LayerNormRow<Float> row{out + offset, sum_out + offset, stream_rows + offset, branch ? branch + offset : nullptr,
                                weight, bias, channels};
  MeanAndRstd stats;
  if constexpr (packs > 0) stats = normalise_kept_row<packs, N>(row, seen);
  else stats = normalise_long_row<N>(row, seen);
  seen.raise();
  if (threadIdx.x % row_lanes == 0) {
    means[number] = stats.mean;
    rstds[number] = stats.rstd;
  }
}

// Sums each value over the block, with one barrier; every thread gets the results. `scratch` must not have been used
// since the barrier before the last one.
template <int count>
__device__ void block_reduce_sums(float (&values)[count], float (&scratch)[32][count]) {
  warp_reduce_sums(values);
  if (threadIdx.x % 32 == 0) store(scratch[threadIdx.x / 32], values);
  __syncthreads();
  for (int i = 0; i < count; ++i) values[i] = 0;
#pragma unroll 1  // unrolling would cost registers and save little
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
    float of_warp[count];
    load(scratch[warp], of_warp);
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] += of_warp[i];
  }
}

// A thread's packs of the rows that its block works on, and these rows' stats.
template <class Float, int N>
struct RowsAtOnce {
  static constexpr int count = layernorm_rows_at_once;
  PackWords<Float, N> d[count], x[count], dr[count];
  MeanAndRstd stats[count];
};

// Rows row, row + 1, ..., of rows before `last`. All loads are issued, without a branch: columns and rows that are not
// there are loaded from the last ones that are. Such a row's gradients count as zero.
template <class Float, int N>
__device__ inline RowsAtOnce<Float, N> load_rows(const Float* dsum, const Float* dout, const Float* sum,
                                                 const float* means, const float* rstds, int row, int last, int channels) {
  RowsAtOnce<Float, N> rows;
  const int c = min(int(threadIdx.x) * N, channels - N);
#pragma unroll
  for (int r = 0; r < rows.count; ++r) {
    const int existing = min(row + r, last - 1);
    const size_t offset = size_t(existing) * channels + c;
    rows.d[r] = load_pack<N>(dout + offset);
    rows.x[r] = load_pack<N>(sum + offset);
    rows.dr[r] = load_pack<N>(dsum + offset);
    rows.stats[r] = {means[existing], rstds[existing]};
  }
  return rows;
}

template <class Float, int N, class Seen>
__global__ void __launch_bounds__(kept_row_block)
layernorm_backward_kernel(Float* dsum, float* dweight_partial, float* dbias_partial, const Float* dout,
                          const Float* sum, const Float* weight, const float* means, const float* rstds, int rows,
                          int rows_per_block, int channels, Seen seen) {
  constexpr int at_once = layernorm_rows_at_once;
  // two, used in turn, because some warps are ahead of others
  alignas(64) __shared__ float scratch[2][32][2 * at_once];
  const int c = threadIdx.x * N, first = blockIdx.x * rows_per_block, last = min(first + rows_per_block, rows);
  const float one_of_channels = 1.0f / channels;
  float dweight[N] = {}, dbias[N] = {}, w[N] = {};  // a thread without columns adds zeros to the row's sums
  if (c < channels) load(weight + c, w);

  RowsAtOnce<Float, N> next = load_rows<Float, N>(dsum, dout, sum, means, rstds, first, last, channels);
  for (int row = first; row < last; row += at_once) {
    const RowsAtOnce<Float, N> now = next;
    next = load_rows<Float, N>(dsum, dout, sum, means, rstds, row + at_once, last, channels);
    float g[at_once][N], n[at_once][N], d[N], dr[N];
    float sums[2 * at_once] = {};  // Σ g of each row, then Σ g·n of each row
#pragma unroll
    for (int r = 0; r < at_once; ++r) {
      unpack(r == 0 ? now.d[r] : pack_if(row + r < last, now.d[r]), d);
      unpack(now.x[r], n[r]);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        n[r][k] = (n[r][k] - now.stats[r].mean) * now.stats[r].rstd;
        g[r][k] = d[k] * w[k];
        sums[r] += g[r][k];
        sums[at_once + r] += g[r][k] * n[r][k];
        dweight[k] += d[k] * n[r][k];
        dbias[k] += d[k];
      }
    }
    block_reduce_sums(sums, scratch[(row - first) / at_once % 2]);
#pragma unroll
    for (int r = 0; r < at_once; ++r) {
      const float rstd = now.stats[r].rstd;
      const float g_bar = sums[r] * one_of_channels, gn_bar = sums[at_once + r] * one_of_channels;
      unpack(now.dr[r], dr);
#pragma unroll
      for (int k = 0; k < N; ++k) dr[k] += rstd * (g[r][k] - g_bar - n[r][k] * gn_bar);
      if (row + r >= last || c >= channels) continue;
      store(dsum + size_t(row + r) * channels + c, dr);
      seen.see(dr);
    }
  }
  seen.raise();
  if (c < channels && dweight_partial) {
    store(dweight_partial + size_t(blockIdx.x) * channels + c, dweight);
    store(dbias_partial + size_t(blockIdx.x) * channels + c, dbias);
  }
}

template <class Float, int N, class Seen>
__global__ void layernorm_backward_long_rows_kernel(Float* dsum, float* dweight_partial, float* dbias_partial,
                                                    const Float* dout, const Float* sum, const Float* weight,
                                                    const float* means, const float* rstds, int rows, int channels,
                                                    Seen seen) {
  __shared__ float mean_g[layernorm_rows_per_block], mean_gn[layernorm_rows_per_block];
  const int first = blockIdx.x * layernorm_rows_per_block;
  const int count = min(layernorm_rows_per_block, rows - first);

  for (int r = threadIdx.x / row_lanes; r < count; r += blockDim.x / row_lanes) {
    const size_t offset = size_t(first + r) * channels;
    const float mean = means[first + r], rstd = rstds[first + r];
    float sums[2] = {}, d[N], w[N], x[N];  // sums: Σ g, Σ g·n
    for (int c = threadIdx.x % row_lanes * N; c < channels; c += row_lanes * N) {
      load(dout + offset + c, d);
      load(weight + c, w);
      load(sum + offset + c, x);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sums[0] += d[k] * w[k];
        sums[1] += d[k] * w[k] * (x[k] - mean) * rstd;
      }
    }
    if constexpr (row_lanes > 1) warp_reduce_sums(sums);
    if (threadIdx.x % row_lanes == 0) {
      mean_g[r] = sums[0] / channels;
      mean_gn[r] = sums[1] / channels;
    }
  }
  __syncthreads();

  for (int c = threadIdx.x * N; c < channels; c += blockDim.x * N) {
    float dweight[N] = {}, dbias[N] = {}, w[N];
    load(weight + c, w);
    for (int r = 0; r < count; ++r) {
      const size_t offset = size_t(first + r) * channels + c;
      const float mean = means[first + r], rstd = rstds[first + r], g_bar = mean_g[r], gn_bar = mean_gn[r];
      float d[N], x[N], dr[N];
      load(dout + offset, d);
      load(sum + offset, x);
      load(dsum + offset, dr);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float n = (x[k] - mean) * rstd;
        dweight[k] += d[k] * n;
        dbias[k] += d[k];
        dr[k] += rstd * (d[k] * w[k] - g_bar - n * gn_bar);
      }
      store(dsum + offset, dr);
      seen.see(dr);
    }
    if (!dweight_partial) continue;
    store(dweight_partial + size_t(blockIdx.x) * channels + c, dweight);
    store(dbias_partial + size_t(blockIdx.x) * channels + c, dbias);
  }
  seen.raise();
}

// out, sum, stream_rows, branch (rows, C), weight, bias (C) in Float; mean, rstd (rows) float. If branch is null, stream_rows
// itself is normalised and sum is not written. `sum` may be `stream_rows`. maximum: raised to the largest |out|; null:
// nobody asks for it
template <class Float>
void residual_layernorm_forward(Float* out, Float* sum, float* mean, float* rstd, const Float* stream_rows,
                                const Float* branch, const Float* weight, const Float* bias, int rows, int channels,
                                cudaStream_t stream, float* maximum = nullptr) {
  const size_t count = size_t(rows) * channels, row_count = size_t(rows);
  KernelRange range("residual_layernorm_forward", stream, layernorm_forward_counts(double(count), sizeof(Float), branch ? 4 : 2),
                    {{out, count}, {mean, row_count}, {rstd, row_count}});
  if (branch) range.writes(sum, count);  // last: the numbers of the others are always the same
  const int threads = std::max(4 * row_lanes, 32);
  with_pack<Float>(channels, maximum, [&](auto N, auto seen) {
    with_count<N == 1 ? 0 : kept_packs>(ceil_div(channels, row_lanes * N), [&](auto packs) {
      residual_layernorm_forward_kernel<Float, N, packs><<<ceil_div(rows, threads / row_lanes), threads, 0, stream>>>(
          out, sum, mean, rstd, stream_rows, branch, weight, bias, rows, channels, seen);
    });
  });
}

// Floats of workspace that layernorm_backward needs.
inline size_t layernorm_workspace(int rows, int channels) {
  return 2 * round_up(size_t(ceil_div(rows, layernorm_rows_per_block)) * channels, size_t(64));
}

// dsum (rows, C) in Float += the gradient through the norm. dweight, dbias (C) float are written, or added to if
// `accumulate`; null: they are not wanted. dout (rows, C); sum (rows, C): the input that forward normalised. maximum:
// raised to the largest |dsum|; null: nobody asks for it
template <class Float>
void layernorm_backward(Float* dsum, float* dweight, float* dbias, const Float* dout, const Float* sum,
                        const Float* weight, const float* mean, const float* rstd, int rows, int channels,
                        bool accumulate, float* workspace, cudaStream_t stream, float* maximum = nullptr) {
  const size_t count = size_t(rows) * channels;
  KernelRange range("layernorm_backward", stream, layernorm_backward_counts(double(count), sizeof(Float)), {{dsum, count}});
  if (dweight) range.writes(dweight, channels, accumulate), range.writes(dbias, channels, accumulate);
  float* const dweights = dweight ? workspace : nullptr;  // partial sums
  float* const dbiases = workspace + layernorm_workspace(rows, channels) / 2;
  int rows_per_block = layernorm_rows_per_block;
  with_pack<Float>(channels, maximum, [&](auto N, auto seen) {
    const int threads = round_up(channels / N, row_lanes);
    const bool keeps_rows = threads <= kept_row_block;
    if (keeps_rows)
      rows_per_block = round_up(std::max(rows_per_block, ceil_div(rows, layernorm_most_blocks)), layernorm_rows_at_once);
    const int blocks = ceil_div(rows, rows_per_block);
    if (keeps_rows)
      layernorm_backward_kernel<Float, N><<<blocks, threads, 0, stream>>>(
          dsum, dweights, dbiases, dout, sum, weight, mean, rstd, rows, rows_per_block, channels, seen);
    else
      layernorm_backward_long_rows_kernel<Float, N><<<blocks, std::min(threads, 256), 0, stream>>>(
          dsum, dweights, dbiases, dout, sum, weight, mean, rstd, rows, channels, seen);
  });
  if (dweight)
    add_partial_sums({dweight, dweights}, {dbias, dbiases}, ceil_div(rows, rows_per_block), channels, accumulate, stream);
}
