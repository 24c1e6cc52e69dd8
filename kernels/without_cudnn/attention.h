// There is no library for attention on the CPU device and in a GPU build without cuDNN. kernels/attention.cuh explains
// these functions.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "kernels/attention_shape.h"

constexpr bool has_library_attention = false;

inline std::string library_attention_name() { return "no library"; }

template <class Float>
std::string plan_library_attention(const AttentionSizes&, const AttentionStrides&) {
  return "this program was built without cuDNN";
}
template <class Float>
bool library_attention_is_planned(const AttentionSizes&, const AttentionStrides&) {
  return false;
}

inline size_t library_attention_workspace_bytes() { return 0; }

template <class Float>
void library_attention_forward(const Heads<Float>&, float*, const QkvHeads<const Float>&, const AttentionSizes&,
                               cudaStream_t, const AttentionBody&) {}
template <class Float>
void library_attention_backward(const QkvHeads<Float>&, const Heads<const Float>&, const Heads<const Float>&,
                                const QkvHeads<const Float>&, const float*, const AttentionSizes&, cudaStream_t, const AttentionBody&) {}
