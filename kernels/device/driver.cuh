// Functions of the CUDA driver, found without linking to it. This file asks which version of the runtime it is compiled
// with.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

#include "kernels/device/check.cuh"

// version: the first that has the function, 12000 being 12.0.
template <class Function>
Function* driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result));
#else
  CUDA_CHECK(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result));
#endif
  if (result != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string("the driver has no ") + name + ": install one for CUDA " +
                             std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) + " or later");
  return reinterpret_cast<Function*>(found);
}
