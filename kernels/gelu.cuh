// GELU, the tanh form of Hendrycks and Gimpel (arXiv:1606.08415), as GPT-2 uses it:
//   gelu(x)  = x/2 · (1 + tanh u),   u = √(2/π) · (x + 0.044715 x³)
// As (1 + tanh u)/2 is the sigmoid s of 2u, which takes half of tanh's instructions, this is
//   gelu(x)  = x·s
//   gelu'(x) = s + x·s·(1 − s) · 2·√(2/π) · (1 + 3·0.044715 x²)
//
// Elementwise over n = B·T·4C elements, one pack per thread.
// Forward moves 2·n elements (reads x, writes out), backward 3·n. About 10 and 20 FLOPs per element.
#pragma once

#include "kernels/counts.h"
#include "kernels/device/common.cuh"
#include "kernels/device/maximum.cuh"

constexpr float gelu_scale = 0.7978845608028654f;  // √(2/π)
constexpr float gelu_cubic = 0.044715f;

template <class Float, int N, class Seen>
__global__ void gelu_forward_kernel(Float* out, const Float* input, size_t count, Seen seen) {
  size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float x[N], s[N];
  load(input + i, x);
#pragma unroll
  for (int k = 0; k < N; ++k) s[k] = 2 * gelu_scale * (x[k] + gelu_cubic * x[k] * x[k] * x[k]);  // 2u
  sigmoid_pack<Float>(s);  // s, from 2u
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] *= s[k];
  store(out + i, x);
  seen.see(x);
  seen.raise();
}

template <class Float, int N, class Seen>
__global__ void gelu_backward_kernel(Float* gradient, const Float* input, size_t count, Seen seen) {
  size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float x[N], d[N], s[N];
  load(input + i, x);
  load(gradient + i, d);
#pragma unroll
  for (int k = 0; k < N; ++k) s[k] = 2 * gelu_scale * (x[k] + gelu_cubic * x[k] * x[k] * x[k]);  // 2u
  sigmoid_pack<Float>(s);  // s, from 2u
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float slope = 2 * gelu_scale * (1.0f + 3.0f * gelu_cubic * x[k] * x[k]);
    d[k] *= s[k] + x[k] * s[k] * (1.0f - s[k]) * slope;
  }
  store(gradient + i, d);
  seen.see(d);
  seen.raise();
}

// out (rows, columns) = gelu(input). maximum: raised to the largest |out|; null: nobody asks for it
template <class Float>
void gelu_forward(Float* out, const Float* input, int rows, int columns, cudaStream_t stream, float* maximum = nullptr) {
  const size_t count = size_t(rows) * columns;
  KernelRange range("gelu_forward", stream, gelu_forward_counts(double(count), sizeof(Float)), {{out, count}});
  with_pack<Float>(columns, maximum, [&](auto N, auto seen) {
    gelu_forward_kernel<Float, N><<<pack_blocks(count / N), pack_block, 0, stream>>>(out, input, count, seen);
  });
}

// gradient (rows, columns), in place: on entry with respect to gelu's output, on return with respect to its input.
// maximum: raised to the largest |gradient|; null: nobody asks for it
template <class Float>
void gelu_backward(Float* gradient, const Float* input, int rows, int columns, cudaStream_t stream,
                   float* maximum = nullptr) {
  const size_t count = size_t(rows) * columns;
  KernelRange range("gelu_backward", stream, gelu_backward_counts(double(count), sizeof(Float)), {{gradient, count}});
  with_pack<Float>(columns, maximum, [&](auto N, auto seen) {
    gelu_backward_kernel<Float, N><<<pack_blocks(count / N), pack_block, 0, stream>>>(gradient, input, count, seen);
  });
}
