// Device memory full of random numbers. With zeros a processor would need less power, and its clock would be higher.
#pragma once

#include <algorithm>
#include <vector>

#include "test/buffer.cuh"

// Normal numbers; after a million of them they repeat.
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
