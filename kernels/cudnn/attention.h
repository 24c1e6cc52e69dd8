// Attention by cuDNN, for bf16 and fp16. kernels/attention.cuh explains these functions; attention.cpp beside this file
// implements them. It is compiled once, and not with every program, because cuDNN's frontend takes longer to compile
// than all of gpt.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <string>

constexpr bool has_library_attention = true;

std::string library_attention_name();

template <class Float>
std::string plan_library_attention(int batch, int seq_len, int heads, int head_size);
template <class Float>
bool library_attention_is_planned(int batch, int seq_len, int heads, int head_size);

size_t library_attention_workspace_bytes();
void use_library_attention_workspace(void* workspace, size_t bytes);

template <class Float>
void library_attention_forward(Float* out, float* lse, const Float* qkv, int batch, int seq_len, int heads,
                               int head_size, cudaStream_t stream);
template <class Float>
void library_attention_backward(Float* dqkv, const Float* dout, const Float* out, const Float* qkv, const float* lse,
                                int batch, int seq_len, int heads, int head_size, cudaStream_t stream);
