// Prepares the output of a matrix product with a bias, where the library has no epilogue that adds the bias:
//
//   out (rows, columns) = bias (columns) in each row [+ out]
//
// The product is then added to `out` in float, so bias and product are rounded once, together. With [+ out], the sum of
// `out` and bias is rounded first. This is profiled as a part of the product. Writes rows·columns elements.
#pragma once

#include "kernels/device/common.cuh"

template <class Float, class Out, int N>
__global__ void bias_rows_kernel(Out* out, const Float* bias, size_t packs, int packs_per_row, bool accumulate) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  float sum[N], before[N] = {};
  load(bias + i % packs_per_row * N, sum);
  if (accumulate) load(out + i * N, before);
  add(sum, before);
  store(out + i * N, sum);
}

template <class Float, class Out>
void bias_rows(Out* out, const Float* bias, int rows, int columns, bool accumulate, cudaStream_t stream) {
  with_pack<Float>(columns, [&](auto N) {
    const size_t packs = size_t(rows) * columns / N;
    bias_rows_kernel<Float, Out, N>
        <<<pack_blocks(packs), pack_block, 0, stream>>>(out, bias, packs, columns / N, accumulate);
  });
}
