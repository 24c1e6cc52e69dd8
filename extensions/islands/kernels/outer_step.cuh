// The outer step of islands (extensions/islands/islands.cuh): Nesterov's momentum, as PyTorch's SGD has it, on the mean of the
// islands' weights. w₀ are the weights after the last outer step, from which all islands have started:
//   g = w₀ − mean;   v = µ·v + g;   w = w₀ − lr·(g + µ·v)
// It is computed as w = mean + (1 − lr)·g − lr·µ·v, which with lr 1 and µ 0 is the mean itself, bit for bit.
//
// Elementwise, one pack of floats per thread; counts are multiples of the pack (units are padded).
//   mean_over_islands   moves 4 bytes per element and island, and 4
//   change              out = w − w₀                     moves 12 bytes per element
//   apply_change        w = w₀ + the islands' sum / G    moves 12 bytes per element
//   outer_step          moves 24 bytes per element: reads mean, w₀ and v, writes w, w₀ and v. 7 FLOPs
#pragma once

#include "kernels/device/common.cuh"

[[maybe_unused]] static
__global__ void mean_over_islands_kernel(float* mean, const float* values, int islands, size_t count) {
  constexpr int N = pack_width<float>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float sum[N] = {};
  for (int island = 0; island < islands; ++island) {
    float x[N];
    load(values + island * count + i, x);
    add(sum, x);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) sum[k] /= float(islands);
  store(mean + i, sum);
}

// out = w + x / divisor
[[maybe_unused]] static
__global__ void add_scaled_kernel(float* out, const float* w, const float* x, float divisor, size_t count) {
  constexpr int N = pack_width<float>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float a[N], b[N];
  load(w + i, a);
  load(x + i, b);
#pragma unroll
  for (int k = 0; k < N; ++k) a[k] += b[k] / divisor;
  store(out + i, a);
}

[[maybe_unused]] static
__global__ void outer_step_kernel(float* weights, float* start, float* momentum, const float* mean, size_t count,
                                  float lr, float mu) {
  constexpr int N = pack_width<float>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float w[N], w0[N], v[N];
  load(mean + i, w);
  load(start + i, w0);
  load(momentum + i, v);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float g = w0[k] - w[k];
    v[k] = mu * v[k] + g;
    w[k] += (1 - lr) * g - lr * (mu * v[k]);
  }
  store(weights + i, w);
  store(start + i, w);
  store(momentum + i, v);
}

// mean (count) = the mean of values (islands, count), added up in the order of the islands: the same bits on every rank,
// unlike a library's sum, whose order depends on links.
inline void mean_over_islands(float* mean, const float* values, int islands, size_t count, cudaStream_t stream) {
  KernelRange range("mean_over_islands", stream, {4.0 * (islands + 1) * count, double(islands) * count}, {{mean, count}});
  mean_over_islands_kernel<<<float_pack_blocks(count), pack_block, 0, stream>>>(mean, values, islands, count);
}

// out (count) = weights − start
inline void change(float* out, const float* weights, const float* start, size_t count, cudaStream_t stream) {
  KernelRange range("change", stream, {12.0 * count, 1.0 * count}, {{out, count}});
  add_scaled_kernel<<<float_pack_blocks(count), pack_block, 0, stream>>>(out, weights, start, -1, count);
}

// mean (count) = start + the mean of the islands' changes. sums: of all islands; may be the same array as mean
inline void apply_change(float* mean, const float* start, const float* sums, int islands, size_t count, cudaStream_t stream) {
  KernelRange range("apply_change", stream, {12.0 * count, 2.0 * count}, {{mean, count}});
  add_scaled_kernel<<<float_pack_blocks(count), pack_block, 0, stream>>>(mean, start, sums, float(islands), count);
}

// All arrays have `count` elements. start: w₀, which becomes w. mean may be the same array as weights.
inline void outer_step(float* weights, float* start, float* momentum, const float* mean, size_t count, float lr, float mu,
                       cudaStream_t stream) {
  KernelRange range("outer_step", stream, {24.0 * count, 7.0 * count}, {{weights, count}, {momentum, count}});
  outer_step_kernel<<<float_pack_blocks(count), pack_block, 0, stream>>>(weights, start, momentum, mean, count, lr, mu);
}
