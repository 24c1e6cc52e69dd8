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

template <class T>
std::string plan_library_attention(int batch, int seq_len, int heads, int head_size);
template <class T>
bool library_attention_is_planned(int batch, int seq_len, int heads, int head_size);

size_t library_attention_workspace_bytes();
void use_library_attention_workspace(void* workspace, size_t bytes);

template <class T>
void library_attention_forward(T* out, float* lse, const T* qkv, int batch, int seq_len, int heads, int head_size,
                               cudaStream_t stream);
template <class T>
void library_attention_backward(T* dqkv, const T* dout, const T* out, const T* qkv, const float* lse, int batch,
                                int seq_len, int heads, int head_size, cudaStream_t stream);
