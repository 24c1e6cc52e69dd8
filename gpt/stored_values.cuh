// Values of any storage type, in device or host memory, as the floats that checkpoints hold.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/device/common.cuh"
#include "kernels/device/memory.cuh"

// to (count) = from, on the stream. Floats arrive when the stream has come so far; for others this waits.
template <class E>
void read_values(float* to, const E* from, size_t count, cudaStream_t stream) {
  if constexpr (std::is_same_v<E, float>) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, count * sizeof(E), cudaMemcpyDefault, stream));
  } else {
    std::vector<E> stored(count);
    copy_and_wait(stored.data(), from, count, cudaMemcpyDefault, stream);
    std::ranges::transform(stored, to, [](E x) { return to_float(x); });
  }
}

// to = from, rounded. Waits.
template <class E>
void write_values(E* to, const std::vector<float>& from, cudaStream_t stream) {
  std::vector<E> stored(from.size());
  std::ranges::transform(from, stored.begin(), [](float x) { return from_float<E>(x); });
  copy_and_wait(to, stored.data(), from.size(), cudaMemcpyDefault, stream);
}
