// Attention of a model by kernels for Hopper (--attention hopper; auto takes them where they can compute it).
#pragma once

#include "extensions/hopper/kernels/hopper_attention_backward.cuh"
#include "gpt/model_room.cuh"

template <class Float>
class HopperAttention final : public AttentionKernels<Float> {
 public:
  std::string name() const override { return "hopper"; }
  std::string problem(int head_size) const override {
    if (!has_wgmma()) return "this GPU is not of compute capability 9.0, or the program not built for it (ARCHS=90a)";
    if (!flash_attention_fits(head_size, head_size))
      return "its head sizes are multiples of 8 up to 128, and this is " + std::to_string(head_size);
    return "";
  }
  void lay_out(Arena& arena, const AttentionSizes& largest) override {
    sums_ = arena.take<float>(hopper_attention_workspace(largest));
  }

  void forward(const Heads<Float>& out, float* lse, const QkvHeads<const Float>& qkv, const AttentionSizes& sizes, cudaStream_t stream,
               float* maximum) override {
    hopper_attention_forward(out, lse, qkv, sizes, stream, maximum);
  }
  void backward(const QkvHeads<Float>& dqkv, float* row_dots, const Heads<const Float>& dout, const Heads<const Float>& out,
                const QkvHeads<const Float>& qkv, const float* lse, const AttentionSizes& sizes, cudaStream_t stream,
                float* maximum) override {
    hopper_attention_backward(dqkv, row_dots, sums_, dout, out, qkv, lse, sizes, stream, maximum);
  }
  void backward_of_part(const QkvHeads<float>& dqkv, float* row_dots, const Heads<const Float>& dout, const Heads<const Float>& out,
                        const QkvHeads<const Float>& qkv, const float* lse, const AttentionSizes& sizes, cudaStream_t stream,
                        float* maximum) override {
    hopper_attention_backward(dqkv, row_dots, sums_, dout, out, qkv, lse, sizes, stream, maximum);
  }

 private:
  float* sums_ = nullptr;  // hopper_attention_workspace() of the largest attention
};

template <class Float>
std::optional<ModelRoom> hopper_model(ModelParts<Float>& parts) {
  if constexpr (sizeof(Float) == 2) {
    const ModelOptions& o = parts.options;
    const auto kernels = std::make_shared<HopperAttention<Float>>();
    const bool is_fastest = !o.elsewhere && !is_cpu_device && kernels->problem(o.shape.head_size()).empty();  // the CPU device plays Hopper, slowly
    if (o.attention == "hopper" || (o.attention == "auto" && is_fastest)) {
      parts.kernels = kernels.get();
      return ModelRoom{.memory = "", .clear = [kernels] {}};  // only owns them: attention's workspace has their memory
    }
  }
  return {};
}
