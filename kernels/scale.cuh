// x = factor · x, elementwise over n elements, one pack per thread. Moves 2·n elements, n FLOPs.
#pragma once

#include "kernels/device/common.cuh"

template <class Float, int N>
__global__ void scale_kernel(Float* values, float factor, size_t count) {
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float x[N];
  load(values + i, x);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] *= factor;
  store(values + i, x);
}

// values (rows, columns) *= factor
template <class Float>
void scale(Float* values, float factor, int rows, int columns, cudaStream_t stream) {
  const size_t count = size_t(rows) * columns;
  KernelRange range("scale", stream, 2.0 * count * sizeof(Float), count);
  range.writes(values, count);
  with_pack<Float>(columns, [&](auto N) {
    scale_kernel<Float, N><<<pack_blocks(count / N), pack_block, 0, stream>>>(values, factor, count);
  });
}
