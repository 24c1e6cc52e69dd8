// Attention by cuDNN, for bf16 and fp16. kernels/attention.cuh explains these functions; attention.cpp beside this file
// implements them. It is compiled once, and not with every program, because cuDNN's frontend takes longer to compile
// than all of gpt.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "kernels/attention_shape.h"

constexpr bool has_library_attention = true;

std::string library_attention_name();

template <class Float>
std::string plan_library_attention(const AttentionSizes& sizes, const AttentionStrides& strides);
template <class Float>
bool library_attention_is_planned(const AttentionSizes& sizes, const AttentionStrides& strides);

size_t library_attention_workspace_bytes();

template <class Float>
void library_attention_forward(const Heads<Float>& out, float* lse, const QkvHeads<const Float>& qkv,
                               const AttentionSizes& sizes, cudaStream_t stream, const AttentionBody& body);
template <class Float>
void library_attention_backward(const QkvHeads<Float>& dqkv, const Heads<const Float>& dout,
                                const Heads<const Float>& out, const QkvHeads<const Float>& qkv, const float* lse,
                                const AttentionSizes& sizes, cudaStream_t stream, const AttentionBody& body);
