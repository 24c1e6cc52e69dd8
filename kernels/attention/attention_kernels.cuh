// Attention by other kernels than those of kernels/attention/, which a room adds (gpt/model_room.cuh): of a type of 16 bits, for heads
// that flash_attention_fits.
#pragma once

#include <string>

#include "kernels/attention/attention_shape.h"
#include "kernels/device/memory.cuh"

template <class Float>
class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;

  virtual std::string name() const = 0;
  // Why they can't do heads of this size on this device; empty: they can.
  virtual std::string problem(int head_size) const = 0;
  // Takes workspace for backward. largest: of what a rank computes at a time
  virtual void lay_out(Arena& arena, const AttentionSizes& largest) = 0;
  // As attention_forward() and attention_backward() in kernels/attention/attention.cuh.
  virtual void forward(const Heads<Float>& out, float* lse, const QkvHeads<const Float>& qkv, const AttentionSizes& sizes,
                       cudaStream_t stream, float* maximum) = 0;
  virtual void backward(const QkvHeads<Float>& dqkv, float* row_dots, const Heads<const Float>& dout, const Heads<const Float>& out,
                        const QkvHeads<const Float>& qkv, const float* lse, const AttentionSizes& sizes, cudaStream_t stream,
                        float* maximum) = 0;
  // The same for gradients of a part of the keys, which are to be added up.
  virtual void backward_of_part(const QkvHeads<float>& dqkv, float* row_dots, const Heads<const Float>& dout,
                                const Heads<const Float>& out, const QkvHeads<const Float>& qkv, const float* lse,
                                const AttentionSizes& sizes, cudaStream_t stream, float* maximum) = 0;
};
