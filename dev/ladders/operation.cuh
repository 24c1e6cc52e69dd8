// Shared by the operations of the ladders: which sizes they take, the number of blocks for one thread per element, and
// rounding, and a maximum.
#pragma once

#include <stdexcept>
#include <string>

#include "dev/ladders/options.h"
#include "kernels/device/common.cuh"

// The maximum over a block; every thread gets it. `scratch`: as block_reduce_sum's.
__device__ inline float block_reduce_max(float value, float* scratch) {
  value = warp_reduce_max(value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value = scratch[warp] > value ? scratch[warp] : value;
  return value;
}

namespace ladder {

// Limits of a grid: its y and z, and the warps whose threads an unsigned can number.
constexpr int most_blocks_along_y = 65535, most_warps = 1 << 27;

// Checks a size of a shape. If it is wrong, throws one line that says so, as constructors of operations do before they
// allocate.
inline int size_that(bool fits, const Shape& shape, const std::string& name, const std::string& rule) {
  if (!fits) throw std::invalid_argument(name + "=" + std::to_string(shape[name]) + ": must be " + rule);
  return shape[name];
}

// "head_size=200: must be at most 128"
inline int at_most(int limit, const Shape& shape, const std::string& name) {
  return size_that(shape[name] <= limit, shape, name, "at most " + std::to_string(limit));
}

// "padded=64: must be at least vocabulary=50257"
inline int at_least(const std::string& other, const Shape& shape, const std::string& name) {
  const std::string rule = "at least " + other + "=" + std::to_string(shape[other]);
  return size_that(shape[name] >= shape[other], shape, name, rule);
}

// The number of blocks of `block` threads that together have at least `threads` threads.
inline unsigned blocks_for(size_t threads, int block) { return unsigned(ceil_div(threads, size_t(block))); }

// out = input, rounded to T, one thread per element.
template <class T>
__global__ void round_kernel(T* out, const float* input, size_t count) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(input[i]);
}

}  // namespace ladder
