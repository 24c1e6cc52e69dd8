// Code for a device that rungs need in addition to kernels/device/.
#pragma once

#include "kernels/device/common.cuh"

// Can a block have so much shared memory? More than 48 KB must be requested (allow_shared_memory), and the limit depends on
// the card.
inline bool fits_shared_memory(int bytes) { return bytes <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};
