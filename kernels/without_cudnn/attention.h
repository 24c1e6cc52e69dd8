// There is no library for attention on the CPU device and in a GPU build without cuDNN. kernels/attention.cuh explains
// these functions.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

constexpr bool has_library_attention = false;

inline std::string library_attention_name() { return "no library"; }

template <class Float>
std::string plan_library_attention(int, int, int, int) {
  return "this program was built without cuDNN";
}
template <class Float>
bool library_attention_is_planned(int, int, int, int) {
  return false;
}

inline size_t library_attention_workspace_bytes() { return 0; }
inline void use_library_attention_workspace(void*, size_t) {}

template <class Float>
void library_attention_forward(Float*, float*, const Float*, int, int, int, int, cudaStream_t) {}
template <class Float>
void library_attention_backward(Float*, const Float*, const Float*, const Float*, const float*, int, int, int, int,
                                cudaStream_t) {}
