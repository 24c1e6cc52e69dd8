// There is no library for attention on the CPU device and in a GPU build without cuDNN. kernels/attention.cuh explains
// these functions.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

constexpr bool has_library_attention = false;

inline std::string library_attention_name() { return "no library"; }

template <class T>
std::string plan_library_attention(int, int, int, int) {
  return "this program was built without cuDNN";
}
template <class T>
bool library_attention_is_planned(int, int, int, int) {
  return false;
}

inline size_t library_attention_workspace_bytes() { return 0; }
inline void use_library_attention_workspace(void*, size_t) {}

template <class T>
void library_attention_forward(T*, float*, const T*, int, int, int, int, cudaStream_t) {}
template <class T>
void library_attention_backward(T*, const T*, const T*, const T*, const float*, int, int, int, int, cudaStream_t) {}
