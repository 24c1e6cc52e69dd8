// Low-rank factors instead of a matrix, for messages between ranks (extensions/compression/low_rank.cuh): the arithmetic of PowerSGD
// (Vogels, Karimireddy, Jaggi, arXiv:1905.13727, algorithm 1). A matrix M (rows, columns) has the factors P (R, rows) and
// Q (R, columns), which are the paper's transposed: R is the rank, and Pᵀ·Q approximates M.
//
//   project_rows     M += error · unit,  P = Q·Mᵀ                     reads 8 bytes per element of M, writes 4
//   orthonormalize   rows of P become orthogonal, and of length 1
//   project_columns  Q = P·M                                          reads 4
//   restore          x = Pᵀ·Q,  error = (M − x/N) / unit,  M = x      reads 4, writes 8
//
// All but the second have 2·R FLOPs per element. They do not call the library: its workspace belongs to the stream on which the
// model multiplies at the same time, and a pass over M does more than the product. The order of sums depends on the shape
// alone.
//
// orthonormalize is Gram and Schmidt's method. To find all dot products of a row at once it takes the classical form,
// and twice for each row, which makes rows as orthogonal as Householder's method does (Giraud, Langou, Rozložník, van
// den Eshof, Numerische Mathematik 101, 2005). A row that loses half of its length or more in the second turn has no
// direction left, and becomes zero; another row that depends on the rows before becomes a direction made of rounding
// errors, as good as any. Sums are in double, where squares of very small numbers are not zero.
#pragma once

#include <algorithm>

#include "kernels/device/common.cuh"

constexpr int most_rank = 64;
constexpr int low_rank_block = 256, low_rank_warps = low_rank_block / 32;
constexpr int factors_at_once = 8;  // rows of P or Q that a thread multiplies by one loaded element

// A warp has four rows of M, a thread of it every 32nd column.
[[maybe_unused]] static
__global__ void __launch_bounds__(low_rank_block)
project_rows_kernel(float* p, float* matrix, const float* errors, const float* unit, const float* q, int rows, int columns, int rank) {
  constexpr int N = 4, K = factors_at_once;
  __shared__ float sums[low_rank_warps][32][N * K + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = (blockIdx.x * low_rank_warps + warp) * N;
  const float error_unit = errors ? *unit : 0.0f;
  for (int first = 0; first < rank; first += K) {
    float sum[N][K] = {};
    for (int column = lane; column < columns; column += 32) {
      float x[N], y[K];
#pragma unroll
      for (int r = 0; r < N; ++r) {
        const size_t at = size_t(row + r) * columns + column;
        x[r] = row + r < rows ? matrix[at] : 0.0f;
        if (row + r < rows && errors && first == 0) matrix[at] = x[r] += errors[at] * error_unit;
      }
#pragma unroll
      for (int k = 0; k < K; ++k) y[k] = first + k < rank ? q[size_t(first + k) * columns + column] : 0.0f;
#pragma unroll
      for (int r = 0; r < N; ++r)
#pragma unroll
        for (int k = 0; k < K; ++k) sum[r][k] += x[r] * y[k];
    }
#pragma unroll
    for (int i = 0; i < N * K; ++i) sums[warp][lane][i] = sum[i / K][i % K];
    __syncthreads();
    const int r = lane / K, k = lane % K;  // each lane adds up the 32 terms of one of N · K = 32 sums
    float total = 0;
    for (int i = 0; i < 32; ++i) total += sums[warp][i][lane];
    if (row + r < rows && first + k < rank) p[size_t(first + k) * rows + row + r] = total;
    __syncthreads();
  }
}

// A block has 32 columns of M, a warp of it every eighth row.
[[maybe_unused]] static
__global__ void __launch_bounds__(low_rank_block)
project_columns_kernel(float* q, const float* p, const float* matrix, int rows, int columns, int rank) {
  constexpr int K = factors_at_once;
  __shared__ float sums[low_rank_warps][K][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
  for (int first = 0; first < rank; first += K) {
    float sum[K] = {};
#pragma unroll 4
    for (int row = warp; row < rows && column < columns; row += low_rank_warps) {
      const float x = matrix[size_t(row) * columns + column];
#pragma unroll
      for (int k = 0; k < K; ++k) sum[k] += first + k < rank ? x * p[size_t(first + k) * rows + row] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < K; ++k) sums[warp][k][lane] = sum[k];
    __syncthreads();
    for (int k = warp; k < K && first + k < rank && column < columns; k += low_rank_warps) {
      float total = 0;
      for (int w = 0; w < low_rank_warps; ++w) total += sums[w][k][lane];
      q[size_t(first + k) * columns + column] = total;
    }
    __syncthreads();
  }
}

// dots[j] = the dot product of rows j and k of p, for j from `first` to k: a warp has every eighth of them.
__device__ inline void dot_products(double* dots, const float* p, int rows, int first, int k) {
  for (int j = first + threadIdx.x / 32; j <= k; j += low_rank_warps) {
    double sum = 0;
    for (int i = threadIdx.x % 32; i < rows; i += 32) sum += double(p[size_t(j) * rows + i]) * p[size_t(k) * rows + i];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) dots[j] = sum;
  }
  __syncthreads();
}

// Launched with one block.
[[maybe_unused]] static
__global__ void __launch_bounds__(low_rank_block) orthonormalize_kernel(float* p, int rows, int rank) {
  __shared__ double dots[most_rank];
  for (int k = 0; k < rank; ++k) {
    float* const own = p + size_t(k) * rows;
    double before = 0;  // the square of the row's length before its last turn
    for (int turn = 0; turn < 2; ++turn) {
      dot_products(dots, p, rows, 0, k);
      before = dots[k];
      for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        double x = own[i];
        for (int j = 0; j < k; ++j) x -= dots[j] * p[size_t(j) * rows + i];
        own[i] = float(x);
      }
      __syncthreads();
    }
    dot_products(dots, p, rows, k, k);
    const double square = dots[k], scale = square <= before / 4 ? 0 : 1 / sqrt(square);  // NaN stays NaN
    for (int i = threadIdx.x; i < rows; i += blockDim.x) own[i] = float(own[i] * scale);
    __syncthreads();
  }
}

// A thread has a column of eight rows, neighbouring threads neighbouring columns.
[[maybe_unused]] static
__global__ void __launch_bounds__(low_rank_block)
restore_kernel(float* matrix, float* errors, const float* unit, const float* p, const float* q, int rows, int columns, int rank, int ranks) {
  constexpr int N = 8;
  const int column = blockIdx.y * 32 + threadIdx.x % 32, row = (blockIdx.x * low_rank_warps + threadIdx.x / 32) * N;
  if (column >= columns) return;
  const float error_unit = errors ? *unit : 1.0f;
  float x[N] = {};
  for (int k = 0; k < rank; ++k) {
    const float y = q[size_t(k) * columns + column];
#pragma unroll
    for (int r = 0; r < N; ++r) x[r] += row + r < rows ? p[size_t(k) * rows + row + r] * y : 0.0f;
  }
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const size_t at = size_t(row + r) * columns + column;
    if (row + r >= rows) break;
    if (errors) errors[at] = (matrix[at] - x[r] / float(ranks)) / error_unit;
    matrix[at] = x[r];
  }
}

[[maybe_unused]] static
__global__ void replace_factors_kernel(float* factors, const float* values, size_t count) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count && isfinite(values[i]) && values[i] != 0) factors[i] = values[i];
}

// errors: in units of *unit, the loss scale; null: there are none.
inline void project_rows(float* p, float* matrix, const float* errors, const float* unit, const float* q, int rows, int columns,
                         int rank, cudaStream_t stream) {
  const double count = double(rows) * columns;
  KernelRange range("project_rows", stream, {(errors ? 12 : 4) * count, 2 * rank * count}, {{p, size_t(rank) * rows}});
  project_rows_kernel<<<ceil_div(rows, 4 * low_rank_warps), low_rank_block, 0, stream>>>(p, matrix, errors, unit, q, rows, columns, rank);
}

inline void orthonormalize(float* p, int rows, int rank, cudaStream_t stream) {
  KernelRange range("orthonormalize", stream, {8.0 * rank * rows, 4.0 * rank * rank * rows}, {{p, size_t(rank) * rows}});
  orthonormalize_kernel<<<1, low_rank_block, 0, stream>>>(p, rows, rank);
}

inline void project_columns(float* q, const float* p, const float* matrix, int rows, int columns, int rank, cudaStream_t stream) {
  const double count = double(rows) * columns;
  KernelRange range("project_columns", stream, {4 * count, 2 * rank * count}, {{q, size_t(rank) * columns}});
  project_columns_kernel<<<ceil_div(columns, 32), low_rank_block, 0, stream>>>(q, p, matrix, rows, columns, rank);
}

// x is a sum to which each of `ranks` ranks contributes an equal part. errors: as above.
inline void restore(float* matrix, float* errors, const float* unit, const float* p, const float* q, int rows, int columns, int rank,
                    int ranks, cudaStream_t stream) {
  const double count = double(rows) * columns;
  KernelRange range("restore", stream, {(errors ? 12 : 4) * count, 2 * rank * count}, {{matrix, size_t(rows) * columns}});
  const dim3 grid(ceil_div(rows, 8 * low_rank_warps), ceil_div(columns, 32));
  restore_kernel<<<grid, low_rank_block, 0, stream>>>(matrix, errors, unit, p, q, rows, columns, rank, ranks);
}

// factors (count) = values, except where a value is not finite, or zero (all later products would stay zero there).
inline void replace_factors(float* factors, const float* values, size_t count, cudaStream_t stream) {
  KernelRange range("replace_factors", stream, {8.0 * count, 0}, {{factors, count}});
  replace_factors_kernel<<<pack_blocks(count), pack_block, 0, stream>>>(factors, values, count);
}
