// Column sums of a matrix (rows, columns): the gradient of a bias, and the last step of LayerNorm's backward.
//
// Two levels. In the first, a thread owns a pack of columns and adds 64 rows; that makes a smaller matrix of partial
// sums in float. In the second, a block adds all rows of a few columns, `column_sum_parts` threads to a column. Which
// numbers are added in which order depends on nothing but the shape, so the result has the same bits in every run.
// Neighbouring threads read neighbouring columns.
// Moves rows·columns elements once, and 2/64 of that as float. One addition per element.
#pragma once

#include "kernels/device/common.cuh"

constexpr int column_sum_rows = 64;   // added by a thread of the first level
constexpr int column_sum_packs = 8;   // side by side in a block of the second level: a cache line on a GPU

template <class Float, int N>
__global__ void column_sum_kernel(float* partials, const Float* input, int rows, int columns) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * N, first = blockIdx.y * column_sum_rows;
  if (column >= columns) return;
  const int last = min(first + column_sum_rows, rows);
  float sum[N] = {}, x[N];
  for (int row = first; row < last; row += packs_at_once) {
    PackWords<Float, N> packs[packs_at_once];
#pragma unroll
    for (int r = 0; r < packs_at_once; ++r)
      packs[r] = load_pack<N>(input + size_t(r == 0 ? row : min(row + r, last - 1)) * columns + column);
#pragma unroll
    for (int r = 0; r < packs_at_once; ++r) {
      unpack(pack_if(r == 0 || row + r < last, packs[r]), x);
      add(sum, x);
    }
  }
  store(partials + size_t(blockIdx.y) * columns + column, sum);
}

// A matrix of partial sums (rows, columns), and where its columns' sums go.
struct PartialSums {
  float* out;
  const float* partials;
};

template <int N>
__global__ void add_partial_sums_kernel(PartialSums first, PartialSums second, int rows, int columns, bool accumulate) {
  constexpr int width = column_sum_packs * N;
  alignas(64) __shared__ float sums[column_sum_parts][width];
  const auto [out, partials] = blockIdx.y == 0 ? first : second;
  const int pack = threadIdx.x % column_sum_packs * N, part = threadIdx.x / column_sum_packs;
  const int begin = blockIdx.x * width;
  float sum[N] = {}, x[N];
  if (begin + pack < columns)
#pragma unroll 8
    for (int row = part; row < rows; row += column_sum_parts) {
      load(partials + size_t(row) * columns + begin + pack, x);
      add(sum, x);
    }
  store(&sums[part][pack], sum);
  __syncthreads();
  for (int c = threadIdx.x; c < width && begin + c < columns; c += blockDim.x) {
    float total = accumulate ? out[begin + c] : 0.0f;
    for (int p = 0; p < column_sum_parts; ++p) total += sums[p][c];
    out[begin + c] = total;
  }
}

// The second level for two matrices of one shape: out (columns) = Σ_rows partials, or += if `accumulate`. The second
// one may be missing: its out is null.
inline void add_partial_sums(const PartialSums& first, const PartialSums& second, int rows, int columns,
                             bool accumulate, cudaStream_t stream) {
  with_pack<float>(columns, [&](auto N) {
    const dim3 grid(ceil_div(columns, column_sum_packs * N), second.out ? 2 : 1);
    add_partial_sums_kernel<N><<<grid, column_sum_packs * column_sum_parts, 0, stream>>>(first, second, rows, columns,
                                                                                         accumulate);
  });
}

// Floats of workspace that column_sum needs.
inline size_t column_sum_workspace(int rows, int columns) { return size_t(ceil_div(rows, column_sum_rows)) * columns; }

// out (columns) = Σ_rows input (rows, columns), or += if `accumulate`; at most 64·65,535 rows.
template <class Float>
void column_sum(float* out, const Float* input, int rows, int columns, bool accumulate, float* workspace,
                cudaStream_t stream) {
  const double count = double(rows) * columns;
  KernelRange range("column_sum", stream, {count * sizeof(Float), count}, {{out, size_t(columns), accumulate}});
  const int groups = ceil_div(rows, column_sum_rows);
  with_pack<Float>(columns, [&](auto N) {
    const dim3 grid(ceil_div(columns, 64 * N), groups);
    column_sum_kernel<Float, N><<<grid, 64, 0, stream>>>(workspace, input, rows, columns);
  });
  add_partial_sums({out, workspace}, {}, groups, columns, accumulate, stream);
}
