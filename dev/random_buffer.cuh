// Device memory full of random numbers: with zeros a processor draws less power, and keeps a higher clock.
#pragma once

#include <algorithm>
#include <vector>

#include "test/buffer.cuh"

// Normal numbers, which repeat after a million.
template <class T>
struct RandomBuffer : Buffer<T> {
  RandomBuffer(size_t count, double scale = 1, double mean = 0, unsigned seed = 1) : Buffer<T>(count) {
    const std::vector<T> values = random_values<T>(std::min(count, size_t(1) << 20), scale, mean, seed);
    for (size_t first = 0; first < count; first += values.size())
      CUDA_CHECK(cudaMemcpy(this->data() + first, values.data(), std::min(values.size(), count - first) * sizeof(T),
                            cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
  }
};
