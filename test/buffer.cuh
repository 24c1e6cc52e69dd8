// Device memory with known contents, and comparison with float64: what tests of kernels and ladders share.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/device/common.cuh"

// ThreadSanitizer looks at each access: under it tests leave out their large shapes.
#if defined(CPU_THREAD_SANITIZER)
constexpr bool large_shapes = false;
#else
constexpr bool large_shapes = true;
#endif

// Device memory of `count` elements. Outputs start as NaN, so that an element nobody writes fails every comparison.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    CUDA_CHECK(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)));
    poison();
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) { *this = values; }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const std::vector<T>& values) {
    CUDA_CHECK(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
    return *this;
  }
  // Kernels that still use the memory must have ended: the null stream does not wait for other streams.
  void poison() {
    CUDA_CHECK(cudaMemset(data_, 0xff, count_ * sizeof(T)));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));  // nor do other streams wait for it
  }
  operator T*() const { return data_; }
  T* data() const { return data_; }  // for kernel<<<...>>>, which takes arguments as they are
  size_t size() const { return count_; }

  std::vector<T> get() const {
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<T> values(count_);
    CUDA_CHECK(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  std::vector<double> numbers() const {
    std::vector<double> numbers;
    for (T x : get()) numbers.push_back(double(to_float(x)));
    return numbers;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

template <class T>
std::vector<T> random_values(size_t count, double scale = 1, double mean = 0, unsigned seed = 1) {
  std::mt19937_64 generator(seed * 7919 + count);
  std::normal_distribution<double> normal(mean, scale);
  std::vector<T> values(count);
  for (T& x : values) x = from_float<T>(float(normal(generator)));
  return values;
}

// Random integers from −largest to largest: their sums are exact in any order, as long as they fit the format.
template <class T>
std::vector<T> random_integers(size_t count, int largest, unsigned seed = 1) {
  std::mt19937_64 generator(seed * 7919 + count);
  std::vector<T> values(count);
  for (T& x : values) x = from_float<T>(float(int(generator() % (2 * largest + 1)) - largest));
  return values;
}

template <class T>
std::vector<double> as_double(const std::vector<T>& values) {
  std::vector<double> numbers;
  for (T x : values) numbers.push_back(double(to_float(x)));
  return numbers;
}

// Half a unit in the last place of a value near 1: the largest relative error of one rounding to T, 2^-24, 2^-8, 2^-11.
template <class T>
constexpr double rounding = std::is_same_v<T, float> ? 6e-8 : std::is_same_v<T, __nv_bfloat16> ? 3.91e-3 : 4.9e-4;

// Largest |actual − expected| / (|expected| + floor): `floor` is the size of the terms that cancel in an element.
inline double worst_error(const std::vector<double>& actual, const std::vector<double>& expected, double floor) {
  if (actual.size() != expected.size()) return INFINITY;
  double worst = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    double error = std::abs(actual[i] - expected[i]) / (std::abs(expected[i]) + floor);
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  }
  return worst;
}
