// Attention by a library, in addition to our own kernels: by cuDNN, for bf16 and fp16, in a GPU build that found it;
// other builds have none. kernels/attention/attention.cuh explains these functions.
// extensions/cudnn/kernels/attention.cpp implements them. It is compiled once, and not with every program, because
// cuDNN's frontend takes longer to compile than all of gpt.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "kernels/attention/attention_shape.h"

#if defined(GPT_CUDNN)
constexpr bool has_library_attention = true;
std::string library_attention_name();
// The workspace that suffices for each of the shapes that were planned since the last call.
size_t take_library_attention_workspace_bytes();
#else
constexpr bool has_library_attention = false;
inline std::string library_attention_name() { return "no library"; }
inline size_t take_library_attention_workspace_bytes() { return 0; }
#endif

template <class Float>
constexpr bool library_has_type = has_library_attention && sizeof(Float) == 2;

// Exists only for the types that the library has.
template <class Float>
std::string plan_library_attention(const AttentionSizes& sizes, const AttentionStrides& strides);
template <class Float>
bool library_attention_is_planned(const AttentionSizes& sizes, const AttentionStrides& strides);
template <class Float>
void library_attention_forward(const Heads<Float>& out, float* lse, const QkvHeads<const Float>& qkv,
                               const AttentionSizes& sizes, cudaStream_t stream, const LibraryWorkspace& workspace);
template <class Float>
void library_attention_backward(const QkvHeads<Float>& dqkv, const Heads<const Float>& dout,
                                const Heads<const Float>& out, const QkvHeads<const Float>& qkv, const float* lse,
                                const AttentionSizes& sizes, cudaStream_t stream, const LibraryWorkspace& workspace);
