// Column sums of a matrix (rows, columns): the gradient of a bias, and the last step of LayerNorm's backward.
//
// A tree of fan-in 64: one thread owns a pack of columns and adds 64 rows; the sums are the next level's matrix. The
// tree depends on nothing but the shape, so the result has the same bits in every run. Neighbouring threads read
// neighbouring columns.
// Moves rows·columns elements once, and 1/64 of that again as float. One addition per element.
#pragma once

#include "kernels/device/common.cuh"

constexpr int column_sum_fan_in = 64;

template <class Float, int N>
__global__ void column_sum_kernel(float* out, const Float* input, int rows, int columns, bool accumulate) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * N, group = blockIdx.y;
  if (column >= columns) return;
  const int first = group * column_sum_fan_in;
  const int last = min(first + column_sum_fan_in, rows);
  float sum[N] = {}, x[N];
  if (accumulate) load(out + size_t(group) * columns + column, sum);
#pragma unroll 4
  for (int row = first; row < last; ++row) {
    load(input + size_t(row) * columns + column, x);
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] += x[k];
  }
  store(out + size_t(group) * columns + column, sum);
}

// Floats of workspace that column_sum needs.
inline size_t column_sum_workspace(int rows, int columns) {
  size_t floats = 0;
  for (int level = ceil_div(rows, column_sum_fan_in); level > 1; level = ceil_div(level, column_sum_fan_in))
    floats += round_up(size_t(level) * columns, size_t(64));
  return floats;
}

template <class Float>
void column_sum_level(float* out, const Float* input, int rows, int columns, bool accumulate, float* workspace,
                      cudaStream_t stream) {
  const int groups = ceil_div(rows, column_sum_fan_in);
  with_pack<Float>(columns, [&](auto width) {
    constexpr int N = decltype(width)::value;
    dim3 grid(ceil_div(columns, 64 * N), groups);
    column_sum_kernel<Float, N>
        <<<grid, 64, 0, stream>>>(groups == 1 ? out : workspace, input, rows, columns, groups == 1 && accumulate);
  });
  CUDA_CHECK(cudaGetLastError());
  if (groups > 1)
    column_sum_level<float>(out, workspace, groups, columns, accumulate,
                            workspace + round_up(size_t(groups) * columns, size_t(64)), stream);
}

// out (columns) = Σ_rows input (rows, columns), or += if `accumulate`; at most 64·65,535 rows.
template <class Float>
void column_sum(float* out, const Float* input, int rows, int columns, bool accumulate, float* workspace,
                cudaStream_t stream) {
  KernelRange range("column_sum", stream, double(rows) * columns * sizeof(Float), double(rows) * columns);
  range.writes(out, columns, accumulate);
  column_sum_level(out, input, rows, columns, accumulate, workspace, stream);
}
