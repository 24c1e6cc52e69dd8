// Softmax and cross-entropy over the padded vocabulary, forward and backward in one pass over the logits.
//
//   loss[row] = log Σ_v exp(z_v) − z_target;   dz_v = (softmax(z)_v − [v = target]) · weight · S,   v < V
// Columns V..Vp are padding: their values do not matter, and their gradient is 0. `weight` is the weight of one token's
// loss in the loss of the step, 1 / (tokens of the global batch). S is the loss scale (kernels/norm.cuh), in device
// memory.
//
// One block per row, three passes: maximum, sum, gradient, which overwrites the logits. The first pass keeps the row in
// shared memory if it fits (50,257 logits of 16 bits do, 98 KB). The rows of all blocks that run at once are larger
// than the L2 cache, so without this every pass would read device memory again. A thread reads only the packs that it
// has stored itself, so this needs no barrier. Reads and writes rows·Vp elements once; about 6 FLOPs per element.
#pragma once

#include <algorithm>

#include "kernels/device/common.cuh"

// The shared memory that a block can have on every GPU of compute capability 8.0 or later, less some for the
// reductions. On Hopper two blocks of 1,024 threads share an SM.
constexpr int kept_row_bytes = 98 * 1024 + 512;

// Calls function(column, x) for the thread's packs of row[begin..end).
template <class Float, int N, class Function>
__device__ inline void for_each_pack(const Float* row, int begin, int end, Function function) {
  for (int c = begin + threadIdx.x * N; c < end; c += blockDim.x * N) {
    float x[N];
    load(row + c, x);
    function(c, x);
  }
}

// The three passes over a row, by one block. Columns [0, count) are tokens. N is the pack width; packs from the last
// whole one on hold padding.

// The largest element. If KeepRow, copies the whole packs to `kept`.
template <class Float, int N, bool KeepRow>
__device__ inline float row_maximum(const Float* row, Float* kept, int count, float* scratch) {
  const int whole = count / N * N;
  float max_of_element[N];  // [k]: over element k of the thread's packs
  for (int k = 0; k < N; ++k) max_of_element[k] = -INFINITY;
  for_each_pack<Float, N>(row, 0, whole, [&](int c, float (&x)[N]) {
    if constexpr (KeepRow) store(kept + c, x);
#pragma unroll
    for (int k = 0; k < N; ++k) max_of_element[k] = x[k] > max_of_element[k] ? x[k] : max_of_element[k];
  });
  float thread_max = -INFINITY;
  for (int k = 0; k < N; ++k) thread_max = max_of_element[k] > thread_max ? max_of_element[k] : thread_max;
  for (int c = whole + threadIdx.x; c < count; c += blockDim.x) {
    float x = to_float(row[c]);
    thread_max = x > thread_max ? x : thread_max;
  }
  return block_reduce_max(thread_max, scratch);
}

// Σ exp(x − maximum). The whole packs are read from `kept`.
template <class Float, int N>
__device__ inline float row_sum(const Float* row, const Float* kept, int count, float maximum, float* scratch) {
  const int whole = count / N * N;
  float sum_of_element[N] = {};
  for_each_pack<Float, N>(kept, 0, whole, [&](int, float (&x)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] -= maximum;
    exp_pack(x);
#pragma unroll
    for (int k = 0; k < N; ++k) sum_of_element[k] += x[k];
  });
  float thread_sum = 0;
  for (int k = 0; k < N; ++k) thread_sum += sum_of_element[k];
  for (int c = whole + threadIdx.x; c < count; c += blockDim.x) thread_sum += expf(to_float(row[c]) - maximum);
  return block_reduce_sum(thread_sum, scratch);
}

// row = (exp(x − maximum) / sum − [column = target]) · at_target, and 0 in the padding. `target` is none of the columns
// if it is negative. The whole packs are read from `kept`.
template <class Float, int N>
__device__ inline void write_gradient(Float* row, const Float* kept, int count, int padded, int target, float maximum,
                                      float sum, float at_target) {
  const int whole = count / N * N;
  const float scale = at_target / sum;
  const auto write = [&](int c, float (&x)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] -= maximum;
    exp_pack(x);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] *= scale;
    if (c >= whole)
      for (int k = 0; k < N; ++k) x[k] = c + k < count ? x[k] : 0.0f;
    if (c <= target && target < c + N)
      for (int k = 0; k < N; ++k) x[k] -= c + k == target ? at_target : 0.0f;
    store(row + c, x);
  };
  for_each_pack<Float, N>(kept, 0, whole, write);
  for_each_pack<Float, N>(row, whole, padded, write);
}

template <class Float, int N, bool WriteGradient, bool KeepRow>
__global__ void __launch_bounds__(long_row_block, 2)
cross_entropy_kernel(Float* logits, float* losses, const int* targets, int vocabulary, int padded, float weight,
                     const float* loss_scale) {
  __shared__ float max_scratch[32], sum_scratch[32];
  extern __shared__ __align__(128) char memory[];
  Float *row = logits + size_t(blockIdx.x) * padded, *kept = KeepRow ? reinterpret_cast<Float*>(memory) : row;
  const int target = targets[blockIdx.x];
  const float maximum = row_maximum<Float, N, KeepRow>(row, kept, vocabulary, max_scratch);
  const float sum = row_sum<Float, N>(row, kept, vocabulary, maximum, sum_scratch);
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(sum) + (maximum - to_float(row[target]));
  if constexpr (WriteGradient) {
    __syncthreads();  // thread 0 has read the target's logit
    write_gradient<Float, N>(row, kept, vocabulary, padded, target, maximum, sum, weight * *loss_scale);
  }
}

// *total += scale · Σ losses (rows), by one block: each thread adds every blockDim.x-th loss, then the block adds these
// sums in a fixed tree.
[[maybe_unused]] static
__global__ void sum_losses_kernel(float* total, const float* losses, int rows, float scale) {
  __shared__ float scratch[32];
  float sum = 0;
  for (int row = threadIdx.x; row < rows; row += blockDim.x) sum += losses[row];
  sum = block_reduce_sum(sum, scratch);
  if (threadIdx.x == 0) *total += sum * scale;
}

// The threads of a block for a row.
template <class Float>
int row_threads(int padded) {
  return std::clamp(round_up(padded / pack_width<Float>, 32), 32, long_row_block);
}

// Calls launch(std::bool_constant, bytes): are the whole packs of `count` columns kept in shared memory, and in how much?
template <class Float, class Launch>
void with_kept_row(int count, Launch launch) {
  constexpr int N = pack_width<Float>;
  const int bytes = count / N * N * int(sizeof(Float));
  if (bytes <= kept_row_bytes) launch(std::true_type{}, bytes);
  else launch(std::false_type{}, 0);
}

template <class Float, bool WriteGradient>
void launch_cross_entropy(Float* logits, float* losses, const int* targets, int rows, int vocabulary, int padded,
                          float weight, const float* loss_scale, cudaStream_t stream) {
  with_kept_row<Float>(vocabulary, [&](auto keep, int row_bytes) {
    const auto kernel = cross_entropy_kernel<Float, pack_width<Float>, WriteGradient, decltype(keep)::value>;
    allow_shared_memory(kernel, row_bytes);
    kernel<<<rows, row_threads<Float>(padded), row_bytes, stream>>>(logits, losses, targets, vocabulary, padded, weight,
                                                                   loss_scale);
  });
}

// logits (rows, Vp) in Float are overwritten by their gradients, unless `write_gradient` is false. losses (rows) float,
// targets (rows) token ids below V. Vp is a multiple of the pack width. *total_loss += weight · Σ losses.
template <class Float>
void cross_entropy(Float* logits, float* losses, float* total_loss, const int* targets, int rows, int vocabulary,
                   int padded, float weight, const float* loss_scale, bool write_gradient, cudaStream_t stream) {
  KernelRange range("cross_entropy", stream, (write_gradient ? 2.0 : 1.0) * rows * padded * sizeof(Float),
                    6.0 * rows * padded);
  range.writes(losses, rows);
  if (write_gradient) range.writes(logits, size_t(rows) * padded);
  if (write_gradient)
    launch_cross_entropy<Float, true>(logits, losses, targets, rows, vocabulary, padded, weight, loss_scale, stream);
  else
    launch_cross_entropy<Float, false>(logits, losses, targets, rows, vocabulary, padded, weight, loss_scale, stream);
  sum_losses_kernel<<<1, 256, 0, stream>>>(total_loss, losses, rows, weight);
  CUDA_CHECK(cudaGetLastError());
}
