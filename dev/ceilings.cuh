// The peak rates of a device: its copy bandwidth and its rate of matrix products.
//
// The result is the median of ten rounds of a tenth of a second, after one round in which the clocks settle. All
// numbers are random.
#pragma once

#include <algorithm>
#include <vector>

#include "dev/random_buffer.cuh"
#include "kernels/device/event.cuh"
#include "kernels/linear.cuh"

namespace ceilings {

constexpr int rounds = 10, largest_side = 16384;
constexpr double round_seconds = 0.1;
constexpr size_t copy_bytes = size_t(512) << 20;  // more than 4 times the L2 cache of any GPU so far

// The seconds of one call of `work`, when it is called `count` times in a row.
template <class Work>
double seconds(size_t count, cudaStream_t stream, Work work) {
  Event start(cudaEventDefault), end(cudaEventDefault);
  start.record(stream);
  for (size_t i = 0; i < count; ++i) work();
  end.record(stream);
  CUDA_CHECK(cudaEventSynchronize(end));
  return elapsed_ms(start, end) / 1e3 / double(count);
}

// The median round, after one that is not counted.
template <class Work>
double steady_seconds(cudaStream_t stream, Work work) {
  const double once = seconds(1, stream, work);
  const size_t count = size_t(std::clamp(round_seconds / once, 1.0, 1e6));
  std::vector<double> times;
  for (int round = 0; round <= rounds; ++round) times.push_back(seconds(count, stream, work));
  times.erase(times.begin());
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[rounds / 2];
}

// Bytes per second of a copy within device memory; bytes read and bytes written both count.
inline double copy_rate(cudaStream_t stream) {
  const size_t count = copy_bytes / sizeof(float);
  RandomBuffer<float> from(count);
  Buffer<float> to(count);
  const auto copy = [&] {
    CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), copy_bytes, cudaMemcpyDeviceToDevice, stream));
  };
  copy();
  return 2 * double(copy_bytes) / steady_seconds(stream, copy);
}

struct ProductRate {
  int side;
  double flops;  // per second
};

// A product (n,n)·(n,n) in T, computed as kernels/matmul.cuh computes the model's products. n is doubled from 1024 on
// until one product takes a millisecond. FLOPs 2·n³.
template <class T>
ProductRate product_rate(cudaStream_t stream) {
  gemm_choices().times = true;
  for (int n = 1024;; n *= 2) {
    const size_t count = size_t(n) * n;
    RandomBuffer<T> a(count), b(count, 1, 0, 2);
    Buffer<T> d(count);
    const auto product = [&] { linear_forward<T>(d, a, b, nullptr, n, n, n, stream); };
    product();  // chooses an algorithm
    if (n < largest_side && seconds(3, stream, product) < 1e-3) continue;
    return {n, 2.0 * n * n * n / steady_seconds(stream, product)};
  }
}

}  // namespace ceilings
