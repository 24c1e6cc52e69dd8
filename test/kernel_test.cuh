// What the kernel tests share.
#pragma once

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "test/bounds.h"
#include "test/broken_device.h"
#include "test/buffer.cuh"
#include "test/skip.h"

// The work stream of a test: not the null stream, so that permuted schedules defer what is issued to it.
inline cudaStream_t test_stream() {
  static cudaStream_t stream = [] {
    cudaStream_t s;
    CUDA_CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
  }();
  return stream;
}

// Only an error of the device itself is still there when the same call is made again. A machine without a GPU is not broken.
inline const bool answers_for_the_device = [] {
  device_error = [] {
    cudaDeviceSynchronize();
    const cudaError_t error = cudaDeviceSynchronize();
    const std::string name = cudaGetErrorName(error);
    const bool works = error == cudaSuccess || name == "cudaErrorNoDevice" || name == "cudaErrorInsufficientDriver";
    return std::string(works ? "" : cudaGetErrorString(error));
  };
  return true;
}();

// Unlike ==, tells 0 from -0 and accepts NaN for NaN.
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

#define CHECK_CLOSE(actual, expected, floor, tolerance) CHECK_WITHIN(#actual, worst_error(actual, expected, floor), tolerance)

TYPE_TO_STRING(__nv_bfloat16);
TYPE_TO_STRING(__half);

// Kernels of ours leave the maximum of what they have written, for products in eight bits. left: of bf16
inline void check_maximum(double left, const std::vector<double>& written) {
  double wanted = 0;
  for (const double x : written) wanted = std::isnan(x) || std::isnan(wanted) ? NAN : std::max(wanted, std::abs(x));
  if (std::isnan(wanted)) CHECK(std::isnan(left));
  else CHECK(left == wanted);
}
