// Residual addition: out = residual + branch, rounded to the storage type. Where a LayerNorm follows, that does the
// addition (layernorm.cuh); this kernel is for a sum that is sent to the next pipeline stage. Both round alike, so the
// bits are the same as on one rank.
//
// Elementwise, one pack of elements per thread. Moves 3 elements per element: reads both terms, writes the sum.
#pragma once

#include "kernels/device/common.cuh"

template <class Float, int N>
__global__ void residual_forward_kernel(Float* out, const Float* residual, const Float* branch, size_t count) {
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float x[N], y[N];
  load(residual + i, x);
  load(branch + i, y);
  add(x, y);
  store(out + i, x);
}

// out (rows, channels) = residual (rows, channels) + branch (rows, channels).
template <class Float>
void residual_forward(Float* out, const Float* residual, const Float* branch, int rows, int channels, cudaStream_t stream) {
  const size_t count = size_t(rows) * channels;
  KernelRange range("residual_forward", stream, {3.0 * sizeof(Float) * count, 1.0 * count}, {{out, count}});
  with_pack<Float>(channels, [&](auto N) {
    residual_forward_kernel<Float, N><<<pack_blocks(count / N), pack_block, 0, stream>>>(out, residual, branch, count);
  });
}
