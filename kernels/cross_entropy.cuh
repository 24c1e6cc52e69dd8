// Softmax and cross-entropy over the padded vocabulary, forward and backward in one pass over the logits.
//
//   loss[row] = log Σ_v exp(z_v) − z_target;   dz_v = (softmax(z)_v − [v = target]) · weight · S,   v < V
// Columns V..Vp are padding: their values do not matter, and their gradient is 0. `weight` of a token's loss in the step's:
// 1 / (tokens of the global batch). S: the loss scale (kernels/norm.cuh), in device memory.
//
// A block a row (V is some 50,000: 200 KB, which stays in the caches between the three passes: maximum, sum,
// gradient). The gradient overwrites the logits. Reads and writes rows·Vp elements once; about 6 FLOPs an element.
#pragma once

#include <algorithm>

#include "kernels/common.cuh"

// Calls function(column, x) for the thread's packs of row[0..columns).
template <class T, int N, class Function>
__device__ inline void for_each_pack(const T* row, int columns, Function function) {
  for (int c = threadIdx.x * N; c < columns; c += blockDim.x * N) {
    float x[N];
    load(row + c, x);
    function(c, x);
  }
}

template <class T, int N, bool WriteGradient>
__global__ void cross_entropy_kernel(T* logits, float* losses, const int* targets, int vocabulary, int padded,
                                     float weight, const float* loss_scale) {
  __shared__ float max_scratch[32], sum_scratch[32];
  T* row = logits + size_t(blockIdx.x) * padded;
  const int target = targets[blockIdx.x], whole = vocabulary / N * N;  // the last pack may hold padding

  float lane_max[N];
  for (int k = 0; k < N; ++k) lane_max[k] = -INFINITY;
  for_each_pack<T, N>(row, whole, [&](int, float (&x)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) lane_max[k] = x[k] > lane_max[k] ? x[k] : lane_max[k];
  });
  float thread_max = -INFINITY;
  for (int k = 0; k < N; ++k) thread_max = lane_max[k] > thread_max ? lane_max[k] : thread_max;
  for (int c = whole + threadIdx.x; c < vocabulary; c += blockDim.x) {
    float x = to_float(row[c]);
    thread_max = x > thread_max ? x : thread_max;
  }
  const float maximum = block_reduce_max(thread_max, max_scratch);

  float lane_sum[N] = {};
  for_each_pack<T, N>(row, whole, [&](int, float (&x)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] -= maximum;
    exp_pack(x);
#pragma unroll
    for (int k = 0; k < N; ++k) lane_sum[k] += x[k];
  });
  float thread_sum = 0;
  for (int k = 0; k < N; ++k) thread_sum += lane_sum[k];
  for (int c = whole + threadIdx.x; c < vocabulary; c += blockDim.x) thread_sum += expf(to_float(row[c]) - maximum);
  const float sum = block_reduce_sum(thread_sum, sum_scratch);

  if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + (maximum - to_float(row[target]));
  if constexpr (WriteGradient) {
    __syncthreads();  // thread 0 has read the target's logit
    const float at_target = weight * *loss_scale, scale = at_target / sum;
    for_each_pack<T, N>(row, padded, [&](int c, float (&x)[N]) {
#pragma unroll
      for (int k = 0; k < N; ++k) x[k] -= maximum;
      exp_pack(x);
#pragma unroll
      for (int k = 0; k < N; ++k) x[k] *= scale;
      if (c >= whole)
        for (int k = 0; k < N; ++k) x[k] = c + k < vocabulary ? x[k] : 0.0f;
      if (c <= target && target < c + N)
        for (int k = 0; k < N; ++k) x[k] -= c + k == target ? at_target : 0.0f;
      store(row + c, x);
    });
  }
}

// One block: threads add a stride of the rows each, then the block in a fixed tree.
__global__ void sum_losses_kernel(float* total, const float* losses, int rows, float scale) {
  __shared__ float scratch[32];
  float sum = 0;
  for (int row = threadIdx.x; row < rows; row += blockDim.x) sum += losses[row];
  sum = block_reduce_sum(sum, scratch);
  if (threadIdx.x == 0) *total += sum * scale;
}

// logits (rows, Vp) in place: gradients afterwards, unless `write_gradient` is false. losses (rows). targets (rows) < V.
// A multiple of the pack width divides Vp. *total_loss += weight · Σ losses.
template <class T>
void cross_entropy(T* logits, float* losses, float* total_loss, const int* targets, int rows, int vocabulary,
                   int padded, float weight, const float* loss_scale, bool write_gradient, cudaStream_t stream) {
  KernelRange range("cross_entropy", stream, (write_gradient ? 2.0 : 1.0) * rows * padded * sizeof(T),
                    6.0 * rows * padded);
  range.writes(losses, rows);
  if (write_gradient) range.writes(logits, size_t(rows) * padded);
  constexpr int N = pack_width<T>;
  const int threads = std::clamp(round_up(padded / N, 32), 32, 256);
  if (write_gradient)
    cross_entropy_kernel<T, N, true>
        <<<rows, threads, 0, stream>>>(logits, losses, targets, vocabulary, padded, weight, loss_scale);
  else
    cross_entropy_kernel<T, N, false>
        <<<rows, threads, 0, stream>>>(logits, losses, targets, vocabulary, padded, weight, loss_scale);
  sum_losses_kernel<<<1, 256, 0, stream>>>(total_loss, losses, rows, weight);
  CUDA_CHECK(cudaGetLastError());
}
