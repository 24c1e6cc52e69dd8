// Shared by the ladders of LayerNorm and of the residual addition before it: the norm without packs, and its result in
// float64. kernels/layernorm.cuh has the maths.
#pragma once

#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/layernorm.cuh"

namespace ladder {

inline Shape rows_of_channels(int rows, int channels) { return {{"rows", rows}, {"channels", channels}}; }

struct LayerNormReference {
  std::vector<double> mean, rstd, out;
};

inline LayerNormReference layernorm_reference(const std::vector<double>& x, const std::vector<double>& weight,
                                              const std::vector<double>& bias) {
  const size_t channels = weight.size(), rows = x.size() / channels;
  LayerNormReference right{std::vector<double>(rows), std::vector<double>(rows), std::vector<double>(x.size())};
  for (size_t r = 0; r < rows; ++r) {
    const double* row = &x[r * channels];
    double mean = 0, variance = 0;
    for (size_t c = 0; c < channels; ++c) mean += row[c] / channels;
    for (size_t c = 0; c < channels; ++c) variance += (row[c] - mean) * (row[c] - mean) / channels;
    const double rstd = 1 / std::sqrt(variance + layernorm_epsilon);
    for (size_t c = 0; c < channels; ++c) right.out[r * channels + c] = (row[c] - mean) * rstd * weight[c] + bias[c];
    right.mean[r] = mean;
    right.rstd[r] = rstd;
  }
  return right;
}

// The results of a rung, with the expected ones. A mean of C numbers near 3 is off by less than C roundings of float in
// the worst case, by about √C of them usually.
template <template <class> class Operation, class T>
std::vector<Output> layernorm_outputs(const Operation<T>& o, const LayerNormReference& right) {
  const double sums = 30 * rounding<float>;
  return {{"mean", o.mean.numbers(), right.mean, 1, sums},
          {"rstd", o.rstd.numbers(), right.rstd, 0, sums},
          {"out", o.out.numbers(), right.out, 1, rounding<T> + 3 * sums}};
}

// ---- one thread per row

template <class T>
__global__ void norm_thread_per_row_kernel(T* out, float* means, float* rstds, const T* x, const T* weight,
                                           const T* bias, int rows, int channels) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += size_t(row) * channels;
  out += size_t(row) * channels;
  float mean = 0, variance = 0;
  for (int c = 0; c < channels; ++c) mean += to_float(x[c]);
  mean /= channels;
  for (int c = 0; c < channels; ++c) {
    const float deviation = to_float(x[c]) - mean;
    variance += deviation * deviation;
  }
  const float rstd = 1.0f / sqrtf(variance / channels + layernorm_epsilon);
  for (int c = 0; c < channels; ++c)
    out[c] = from_float<T>((to_float(x[c]) - mean) * rstd * to_float(weight[c]) + to_float(bias[c]));
  means[row] = mean;
  rstds[row] = rstd;
}

// o.out = the norm of x
template <template <class> class Operation, class T>
void norm_thread_per_row(Operation<T>& o, const T* x, cudaStream_t stream) {
  norm_thread_per_row_kernel<T><<<ceil_div(o.rows, 128), 128, 0, stream>>>(
      o.out.data(), o.mean.data(), o.rstd.data(), x, o.weight.data(), o.bias.data(), o.rows, o.channels);
}

// ---- one warp per row

template <class T>
__global__ void norm_warp_per_row_kernel(T* out, float* means, float* rstds, const T* x, const T* weight, const T* bias,
                                         int rows, int channels) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  x += size_t(row) * channels;
  out += size_t(row) * channels;
  float sum = 0, squares = 0;
  for (int c = lane; c < channels; c += 32) sum += to_float(x[c]);
  const float mean = warp_reduce_sum(sum) / channels;
  for (int c = lane; c < channels; c += 32) {
    const float deviation = to_float(x[c]) - mean;
    squares += deviation * deviation;
  }
  const float rstd = 1.0f / sqrtf(warp_reduce_sum(squares) / channels + layernorm_epsilon);
  for (int c = lane; c < channels; c += 32)
    out[c] = from_float<T>((to_float(x[c]) - mean) * rstd * to_float(weight[c]) + to_float(bias[c]));
  if (lane == 0) {
    means[row] = mean;
    rstds[row] = rstd;
  }
}

template <template <class> class Operation, class T>
void norm_warp_per_row(Operation<T>& o, const T* x, cudaStream_t stream) {
  norm_warp_per_row_kernel<T><<<ceil_div(o.rows, 4), 128, 0, stream>>>(
      o.out.data(), o.mean.data(), o.rstd.data(), x, o.weight.data(), o.bias.data(), o.rows, o.channels);
}

}  // namespace ladder
