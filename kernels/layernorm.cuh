// LayerNorm over C channels (Ba, Kiros, Hinton, arXiv:1607.06450), fused with the residual addition before it.
//
//   forward:   r = residual + branch, rounded to the storage type;  mean, rstd = 1/√(var + ε) over r's C channels
//              out = (r − mean)·rstd·weight + bias
//   backward:  with n = (r − mean)·rstd and g = dout·weight,
//              dr += rstd·(g − mean_C(g) − n·mean_C(g·n));  dweight = Σ_rows dout·n;  dbias = Σ_rows dout
// The code calls r `sum`, and dr `dsum`.
//
// Forward: one warp per row, so that only shuffles are needed. The variance takes a second pass over the row, which
// comes from cache (Σx² − mean² in one pass would lose digits by cancellation). Moves 4 elements per channel and row:
// reads residual and branch, writes r and out.
// Backward: one block per 32 rows. Each thread owns a pack of columns, and sums its part of dweight and dbias in
// registers without atomics. The block reads two rows at a time once and keeps them in registers: it computes both
// means of each row, then updates dr. Moves 4 elements per channel and row: reads dout, r and dr, writes dr; the
// partial sums of dweight and dbias are 1/32 of that.
// Rows of more packs than kept_row_block (on a GPU 4,096 channels in 16 bits) are read twice, mostly from cache: first
// by one warp per row for the means, then by columns.
#pragma once

#include <algorithm>

#include "kernels/column_sum.cuh"
#include "kernels/device/common.cuh"

constexpr float layernorm_epsilon = 1e-5f;
constexpr int layernorm_rows_per_block = 32;  // backward
constexpr int layernorm_rows_at_once = 2;     // backward: more rows mean more loads in flight, but more registers

// Writes sum_out = residual + branch (branch null: nothing to add), and returns this lane's part of the row's total.
template <class Float, int N>
__device__ float add_row(Float* sum_out, const Float* residual, const Float* branch, int channels) {
  float sum = 0, x[N], y[N];
  for (int c = threadIdx.x % 32 * N; c < channels; c += 32 * N) {
    load(residual + c, x);
    if (branch) {
      load(branch + c, y);
#pragma unroll
      for (int k = 0; k < N; ++k) x[k] = to_float(from_float<Float>(x[k] + y[k]));
      store(sum_out + c, x);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) sum += x[k];
  }
  return sum;
}

template <class Float, int N>
__device__ float squared_deviations(const Float* row, float mean, int channels) {
  float sum = 0, x[N];
  for (int c = threadIdx.x % 32 * N; c < channels; c += 32 * N) {
    load(row + c, x);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += (x[k] - mean) * (x[k] - mean);
  }
  return sum;
}

template <class Float, int N>
__global__ void residual_layernorm_forward_kernel(Float* out, Float* sum_out, float* means, float* rstds,
                                                  const Float* residual, const Float* branch, const Float* weight,
                                                  const Float* bias, int rows, int channels) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= rows) return;
  const size_t offset = size_t(row) * channels;
  float total = add_row<Float, N>(sum_out + offset, residual + offset, branch ? branch + offset : nullptr, channels);
  const float mean = warp_reduce_sum(total) / channels;
  const Float* normed = (branch ? sum_out : residual) + offset;  // no barrier: a lane reads only what it wrote itself
  const float variance = warp_reduce_sum(squared_deviations<Float, N>(normed, mean, channels)) / channels;
  const float rstd = 1.0f / sqrtf(variance + layernorm_epsilon);
  for (int c = threadIdx.x % 32 * N; c < channels; c += 32 * N) {
    float x[N], w[N], b[N];
    load(normed + c, x);
    load(weight + c, w);
    load(bias + c, b);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = (x[k] - mean) * rstd * w[k] + b[k];
    store(out + offset + c, x);
  }
  if (threadIdx.x % 32 == 0) {
    means[row] = mean;
    rstds[row] = rstd;
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

template <class Float, int N>
__global__ void __launch_bounds__(kept_row_block)
layernorm_backward_kernel(Float* dsum, float* dweight_partial, float* dbias_partial, const Float* dout,
                          const Float* sum, const Float* weight, const float* means, const float* rstds, int rows,
                          int channels) {
  constexpr int rows_at_once = layernorm_rows_at_once;
  // two, used in turn, because some warps are ahead of others
  alignas(64) __shared__ float scratch[2][32][2 * rows_at_once];
  const int c = threadIdx.x * N, first = blockIdx.x * layernorm_rows_per_block;
  const int last = min(first + layernorm_rows_per_block, rows);
  const float one_of_channels = 1.0f / channels;
  float dweight[N] = {}, dbias[N] = {}, w[N] = {};
  if (c < channels) load(weight + c, w);

  for (int row = first; row < last; row += rows_at_once) {
    Pack<Float, N> d_pack[rows_at_once] = {}, x_pack[rows_at_once] = {}, dr_pack[rows_at_once] = {};
    float mean[rows_at_once] = {}, rstd[rows_at_once] = {}, d[N], n[N], dr[N];
    float sums[2 * rows_at_once] = {};  // Σ g of each row, then Σ g·n of each row
#pragma unroll
    for (int r = 0; r < rows_at_once; ++r)
      if (row + r < last && c < channels) {
        const size_t offset = size_t(row + r) * channels + c;
        d_pack[r] = load_pack<N>(dout + offset);
        x_pack[r] = load_pack<N>(sum + offset);
        dr_pack[r] = load_pack<N>(dsum + offset);
        mean[r] = means[row + r];
        rstd[r] = rstds[row + r];
      }
#pragma unroll
    for (int r = 0; r < rows_at_once; ++r) {
      unpack(d_pack[r], d);
      unpack(x_pack[r], n);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        n[k] = (n[k] - mean[r]) * rstd[r];
        sums[r] += d[k] * w[k];
        sums[rows_at_once + r] += d[k] * w[k] * n[k];
        dweight[k] += d[k] * n[k];
        dbias[k] += d[k];
      }
    }
    block_reduce_sums(sums, scratch[row / rows_at_once % 2]);
#pragma unroll
    for (int r = 0; r < rows_at_once; ++r)
      if (row + r < last && c < channels) {
        const float g_bar = sums[r] * one_of_channels, gn_bar = sums[rows_at_once + r] * one_of_channels;
        unpack(d_pack[r], d);
        unpack(x_pack[r], n);
        unpack(dr_pack[r], dr);
#pragma unroll
        for (int k = 0; k < N; ++k) dr[k] += rstd[r] * (d[k] * w[k] - g_bar - (n[k] - mean[r]) * rstd[r] * gn_bar);
        store(dsum + size_t(row + r) * channels + c, dr);
      }
  }
  if (c < channels) {
    store(dweight_partial + size_t(blockIdx.x) * channels + c, dweight);
    store(dbias_partial + size_t(blockIdx.x) * channels + c, dbias);
  }
}

template <class Float, int N>
__global__ void layernorm_backward_long_rows_kernel(Float* dsum, float* dweight_partial, float* dbias_partial,
                                                    const Float* dout, const Float* sum, const Float* weight,
                                                    const float* means, const float* rstds, int rows, int channels) {
  __shared__ float mean_g[layernorm_rows_per_block], mean_gn[layernorm_rows_per_block];
  const int first = blockIdx.x * layernorm_rows_per_block;
  const int count = min(layernorm_rows_per_block, rows - first);

  for (int r = threadIdx.x / 32; r < count; r += blockDim.x / 32) {
    const size_t offset = size_t(first + r) * channels;
    const float mean = means[first + r], rstd = rstds[first + r];
    float sums[2] = {}, d[N], w[N], x[N];  // sums: Σ g, Σ g·n
    for (int c = threadIdx.x % 32 * N; c < channels; c += 32 * N) {
      load(dout + offset + c, d);
      load(weight + c, w);
      load(sum + offset + c, x);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sums[0] += d[k] * w[k];
        sums[1] += d[k] * w[k] * (x[k] - mean) * rstd;
      }
    }
    warp_reduce_sums(sums);
    if (threadIdx.x % 32 == 0) {
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
    }
    store(dweight_partial + size_t(blockIdx.x) * channels + c, dweight);
    store(dbias_partial + size_t(blockIdx.x) * channels + c, dbias);
  }
}

// out, sum, residual, branch (rows, C), weight, bias (C) in Float; mean, rstd (rows) float. If branch is null, residual
// itself is normalised and sum is not written. `sum` may be `residual`.
template <class Float>
void residual_layernorm_forward(Float* out, Float* sum, float* mean, float* rstd, const Float* residual,
                                const Float* branch, const Float* weight, const Float* bias, int rows, int channels,
                                cudaStream_t stream) {
  const double count = double(rows) * channels;
  KernelRange range("residual_layernorm_forward", stream, (branch ? 4 : 2) * count * sizeof(Float), 8 * count);
  range.writes(out, size_t(rows) * channels);
  range.writes(mean, rows);
  range.writes(rstd, rows);
  if (branch) range.writes(sum, size_t(rows) * channels);  // last: the numbers of the others are always the same
  const int warps = 4;
  with_pack<Float>(channels, [&](auto width) {
    constexpr int N = decltype(width)::value;
    residual_layernorm_forward_kernel<Float, N><<<ceil_div(rows, warps), 32 * warps, 0, stream>>>(
        out, sum, mean, rstd, residual, branch, weight, bias, rows, channels);
  });
  CUDA_CHECK(cudaGetLastError());
}

// Floats of workspace that layernorm_backward needs.
inline size_t layernorm_workspace(int rows, int channels) {
  const int blocks = ceil_div(rows, layernorm_rows_per_block);
  return 2 * round_up(size_t(blocks) * channels, size_t(64)) + column_sum_workspace(blocks, channels);
}

// dsum (rows, C) in Float += the gradient through the norm. dweight, dbias (C) float are written, or added to if
// `accumulate`. dout (rows, C); sum (rows, C): the input that forward normalised.
template <class Float>
void layernorm_backward(Float* dsum, float* dweight, float* dbias, const Float* dout, const Float* sum,
                        const Float* weight, const float* mean, const float* rstd, int rows, int channels,
                        bool accumulate, float* workspace, cudaStream_t stream) {
  const double count = double(rows) * channels;
  KernelRange range("layernorm_backward", stream, 4 * count * sizeof(Float), 20 * count);
  range.writes(dsum, size_t(rows) * channels);
  range.writes(dweight, channels, accumulate);
  range.writes(dbias, channels, accumulate);
  const int blocks = ceil_div(rows, layernorm_rows_per_block);
  const size_t stride = round_up(size_t(blocks) * channels, size_t(64));
  with_pack<Float>(channels, [&](auto width) {
    constexpr int N = decltype(width)::value;
    const int threads = round_up(channels / N, 32);
    if (threads <= kept_row_block)
      layernorm_backward_kernel<Float, N><<<blocks, threads, 0, stream>>>(
          dsum, workspace, workspace + stride, dout, sum, weight, mean, rstd, rows, channels);
    else
      layernorm_backward_long_rows_kernel<Float, N><<<blocks, std::min(threads, 256), 0, stream>>>(
          dsum, workspace, workspace + stride, dout, sum, weight, mean, rstd, rows, channels);
  });
  CUDA_CHECK(cudaGetLastError());
  column_sum_level<float>(dweight, workspace, blocks, channels, accumulate, workspace + 2 * stride, stream);
  column_sum_level<float>(dbias, workspace + stride, blocks, channels, accumulate, workspace + 2 * stride, stream);
}
