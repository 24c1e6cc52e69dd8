// The model: GPT-2 (Radford et al. 2019), forward and backward, in the order it is computed.
//
//   x = wte[token] + wpe[position]
//   L times:  x += attention(layernorm(x)) · W + b;   x += gelu(layernorm(x) · W + b) · W + b
//   logits = layernorm(x) · wteᵀ
//
// Symbols: B micro-batch, T sequence length, R = B·T rows, C channels, NH heads, HS = C/NH, V vocabulary, Vp padded to a
// multiple of 128, L layers. Float is the storage type of weights and activations: float, bf16 or half. Every kernel
// takes its results first, then its operands, then the sizes.
//
// The LayerNorm after a residual addition does that addition, too (kernels/layernorm.cuh): it reads both terms of the
// sum, and writes the sum beside its own result. So the residual stream is passed from block to block as two tensors
// that are not added yet: Residual.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "model.cuh"
#include "kernels/attention.cuh"
#include "kernels/cross_entropy.cuh"
#include "kernels/embedding.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/linear.cuh"
#include "parallel/zero.cuh"

// The residual stream, as the sum of two tensors.
template <class Float>
struct Residual {
  const Float* stream;  // (R,C)
  const Float* branch;  // (R,C)  output of the last attention or MLP, to be added to `stream`; null: nothing to add
};

// What a block keeps between forward and backward.
template <class Float>
struct BlockActivations {
  Float* input;      // (R,C)    the residual stream that enters the block
  Float* norm1;      // (R,C)
  Float* qkv;        // (R,3C)
  Float* attention;  // (R,C)
  Float* middle;     // (R,C)    the residual stream after attention
  Float* norm2;      // (R,C)
  Float* up;         // (R,4C)   before gelu
  Float* gelu;       // (R,4C)
  float *mean1, *rstd1, *mean2, *rstd2;  // (R) each
  float* lse;        // (B,NH,T) log-sum-exp of the attention scores
};

// The gradients of a unit's tensors. accumulate: add to what is there.
struct UnitGradients : UnitTensors<float> {
  bool accumulate;
};

template <class Float>
class GPT final : public Model {
 public:
  GPT(const ModelOptions& options, Mesh& mesh, cudaStream_t stream)
      : Model(options, mesh, stream), store_(list_, options.store, memory_, mesh, stream) {
    gemm_choices().use_library(gemm_library());
    if (has_library_attention) library_attention_ = library_attention_name();
    if (options.library_attention)
      attention_problem_ = plan_attention<Float>(options.micro_batch, options.seq_len, options.shape.heads,
                                                 options.shape.head_size());
    memory_.add("activations", [this](Arena& arena) { lay_out_activations(arena); });
    memory_.add("workspace", [this](Arena& arena) { lay_out_workspace(arena); });
    memory_.allocate();
    store_.clear();
  }
  ~GPT() {
    cudaStreamSynchronize(stream_);
    use_gemm_workspace(nullptr);
    use_library_attention_workspace(nullptr, 0);
  }

  Parameters& store() override { return store_; }

 private:
  // The sizes of one batch on this rank. largest() gives those of a full micro-batch, for which memory is allocated.
  struct Sizes {
    int B, T, R, C, NH, HS, V, Vp;
  };
  Sizes sizes(int batch_size, int seq_len) const {
    const ModelShape& s = options_.shape;
    return {batch_size, seq_len, batch_size * seq_len, s.channels, s.heads, s.head_size(), s.vocabulary, list_.vocabulary_rows()};
  }
  Sizes sizes(const Batch& batch) const { return sizes(batch.batch_size, batch.seq_len); }
  Sizes largest() const { return sizes(options_.micro_batch, options_.seq_len); }

  // ---- forward

  void forward_pass(const Batch& batch) override {
    use_gemm_workspace(gemm_workspace_);  // another model of this process may have set its own
    use_library_attention_workspace(attention_workspace_, attention_workspace_bytes_);
    const auto [B, T, R, C, NH, HS, V, Vp] = sizes(batch);
    const auto embedding = weights(0, Pass::forward);
    embedding_forward(blocks_[0].input, batch.inputs, embedding[wte], embedding[wpe], B, T, C, stream_);
    Residual<Float> x = {blocks_[0].input, nullptr};  // (R,C)
    for (int layer = 0; layer < options_.shape.layers; ++layer) x = block_forward(layer, x, sizes(batch));
    const auto norm = weights(final_norm_unit(), Pass::forward);
    residual_layernorm_forward(final_norm_, final_input_, final_mean_, final_rstd_, x.stream, x.branch,
                               norm[final_norm_weight], norm[final_norm_bias], R, C, stream_);  // (R,C)
    if (batch.loss_weight > 0) head(batch);
  }

  // Returns the residual stream after the block.
  Residual<Float> block_forward(int layer, Residual<Float> x, const Sizes& s) {
    const TraceScope scope(layer);
    const auto w = weights(layer + 1, Pass::forward);
    block_activations(layer, w, x, s);
    const BlockActivations<Float>& a = blocks_[layer];
    linear_forward(branch_, a.gelu, w[down_weight], w[down_bias], s.R, 4 * s.C, s.C, stream_);  // (R,C)
    return {a.middle, branch_};
  }

  // Computes a block's forward pass except its last product, whose result backward doesn't need.
  void block_activations(int layer, const UnitTensors<const Float>& w, Residual<Float> x, const Sizes& s) {
    const auto [B, T, R, C, NH, HS, V, Vp] = s;
    const BlockActivations<Float>& a = blocks_[layer];
    residual_layernorm_forward(a.norm1, a.input, a.mean1, a.rstd1, x.stream, x.branch, w[norm1_weight], w[norm1_bias],
                               R, C, stream_);                                 // a.input = x.stream + x.branch  (R,C)
    linear_forward(a.qkv, a.norm1, w[qkv_weight], w[qkv_bias], R, C, 3 * C, stream_);                     // (R,3C)
    attention_forward(a.attention, a.lse, a.qkv, B, T, NH, HS, stream_);                                  // (R,C)
    linear_forward(branch_, a.attention, w[projection_weight], w[projection_bias], R, C, C, stream_);     // (R,C)
    residual_layernorm_forward<Float>(a.norm2, a.middle, a.mean2, a.rstd2, a.input, branch_, w[norm2_weight],
                                      w[norm2_bias], R, C, stream_);           // a.middle = a.input + branch_  (R,C)
    linear_gelu_forward(a.gelu, a.up, a.norm2, w[up_weight], w[up_bias], R, C, 4 * C, stream_);           // (R,4C)
  }

  // Adds loss_weight · Σ losses to the loss. In training it also computes the gradients of its input, final_norm_, and
  // of wte. It works on logit_rows() rows at a time, so that the logits (R,Vp) never lie in memory all at once.
  void head(const Batch& batch) {
    const auto [B, T, R, C, NH, HS, V, Vp] = sizes(batch);
    const Float* table = weights(0, Pass::backward)[wte];  // (Vp,C)  the pass that fetches no other unit after this one
    for (int begin = 0; begin < R; begin += logit_rows()) {
      const int rows = std::min(logit_rows(), R - begin);
      const Float* x = final_norm_ + size_t(begin) * C;                             // (rows,C)
      head_forward(logits_, x, table, rows, C, Vp, stream_);                        // (rows,Vp)
      cross_entropy(logits_, losses_ + begin, &sums_->loss, batch.targets + begin, rows, V, Vp, batch.loss_weight,
                    &store_.summary()->scale.value, batch.training, stream_);       // in training logits_ := dlogits
      if (!batch.training) continue;
      const UnitGradients d = gradients(0);
      head_backward(dfinal_norm_ + size_t(begin) * C, d[wte], logits_, x, table, rows, C, Vp, d.accumulate || begin > 0,
                    stream_);
    }
  }

  int logit_rows() const { return ceil_div(largest().R, options_.logit_chunks); }

  // ---- backward: dX is the gradient of the loss with respect to X. Those of weights are summed over micro-batches.

  void backward_pass(const Batch& batch) override {
    const Sizes s = sizes(batch);
    CUDA_CHECK(cudaMemsetAsync(dstream_, 0, size_t(s.R) * s.C * sizeof(Float), stream_));
    final_norm_backward(s);
    for (int layer = options_.shape.layers - 1; layer >= 0; --layer) {
      const TraceScope scope(layer);
      const auto w = weights(layer + 1, Pass::backward);
      const BlockActivations<Float>& a = blocks_[layer];
      if (options_.recompute == Recompute::block) block_activations(layer, w, {a.input, nullptr}, s);
      if (options_.recompute == Recompute::gelu) gelu_forward(a.gelu, a.up, s.R, 4 * s.C, stream_);
      block_backward(layer, w, s);
    }
    // The head has already written its part of wte's gradient, so wte's is always added to: `accumulate` is for wpe.
    const UnitGradients d = gradients(0);
    embedding_backward(d[wte], d[wpe], batch.inputs, batch.order, dstream_, s.B, s.T, options_.shape.positions, s.C,
                       d.accumulate, stream_);
    store_.gradients_ready(0);
  }

  void final_norm_backward(const Sizes& s) {
    const int unit = final_norm_unit();
    const UnitGradients d = gradients(unit);
    layernorm_backward(dstream_, d[final_norm_weight], d[final_norm_bias], dfinal_norm_, final_input_,
                       weights(unit, Pass::backward)[final_norm_weight], final_mean_, final_rstd_, s.R, s.C, d.accumulate,
                       reductions_, stream_);
    store_.gradients_ready(unit);
  }

  // At first dstream_ holds the gradient with respect to the residual stream after the block, in the end the one with
  // respect to the stream before the block. The backward of each LayerNorm adds to it, because the LayerNorm's input is
  // the stream. Gradients that are never needed at the same time share memory.
  void block_backward(int layer, const UnitTensors<const Float>& w, const Sizes& s) {
    const auto [B, T, R, C, NH, HS, V, Vp] = s;
    const UnitGradients d = gradients(layer + 1);
    const BlockActivations<Float>& a = blocks_[layer];
    Float *const dup = dwide_, *const dqkv = dwide_;                                   // (R,4C) (R,3C)
    Float *const dnorm2 = dnarrow_, *const dattention = dnarrow_, *const dnorm1 = dnarrow_;  // (R,C) each

    linear_gelu_gradient(dup, dstream_, w[down_weight], a.up, R, 4 * C, C, stream_);
    linear_weight_gradient(d[down_weight], d[down_bias], dstream_, a.gelu, R, 4 * C, C, d.accumulate, reductions_, stream_);
    linear_input_gradient(dnorm2, dup, w[up_weight], R, C, 4 * C, stream_);
    linear_weight_gradient(d[up_weight], d[up_bias], dup, a.norm2, R, C, 4 * C, d.accumulate, reductions_, stream_);
    layernorm_backward(dstream_, d[norm2_weight], d[norm2_bias], dnorm2, a.middle, w[norm2_weight], a.mean2, a.rstd2, R, C,
                       d.accumulate, reductions_, stream_);
    linear_input_gradient(dattention, dstream_, w[projection_weight], R, C, C, stream_);
    linear_weight_gradient(d[projection_weight], d[projection_bias], dstream_, a.attention, R, C, C, d.accumulate,
                           reductions_, stream_);
    attention_backward(dqkv, row_dots_, dattention, a.attention, a.qkv, a.lse, B, T, NH, HS, stream_);
    linear_input_gradient(dnorm1, dqkv, w[qkv_weight], R, C, 3 * C, stream_);
    linear_weight_gradient(d[qkv_weight], d[qkv_bias], dqkv, a.norm1, R, C, 3 * C, d.accumulate, reductions_, stream_);
    layernorm_backward(dstream_, d[norm1_weight], d[norm1_bias], dnorm1, a.input, w[norm1_weight], a.mean1, a.rstd1, R, C,
                       d.accumulate, reductions_, stream_);
    store_.gradients_ready(layer + 1);
  }

  // ---- parameters

  UnitTensors<const Float> weights(int unit, Pass pass) { return {store_.acquire(unit, pass), list_.tensors_of(unit)}; }
  UnitGradients gradients(int unit) {
    const auto [data, accumulate] = store_.gradients(unit);
    return {{data, list_.tensors_of(unit)}, accumulate};
  }
  int final_norm_unit() const { return options_.shape.layers + 1; }

  // ---- logits for the host

  std::vector<float> logits(int first, int count) override {
    const auto [B, T, R, C, NH, HS, V, Vp] = largest();
    const Float* table = weights(0, Pass::backward)[wte];
    std::vector<float> all;
    std::vector<Float> row(Vp);
    for (int begin = first; begin < first + count; begin += logit_rows()) {
      const int rows = std::min(logit_rows(), first + count - begin);
      head_forward(logits_, final_norm_ + size_t(begin) * C, table, rows, C, Vp, stream_);
      for (int i = 0; i < rows; ++i) {
        copy_and_wait(row.data(), logits_ + size_t(i) * Vp, size_t(V), cudaMemcpyDeviceToHost, stream_);
        std::transform(row.begin(), row.begin() + V, std::back_inserter(all), [](Float x) { return to_float(x); });
      }
    }
    return all;
  }

  // ---- memory

  void lay_out_activations(Arena& arena) {
    const auto [B, T, R, C, NH, HS, V, Vp] = largest();
    const size_t rows = size_t(R);
    blocks_.resize(size_t(options_.shape.layers));
    for (BlockActivations<Float>& a : blocks_) {
      const bool is_first = &a == &blocks_[0];
      if (is_first || options_.recompute != Recompute::block) {
        a.norm1 = arena.take<Float>(rows * C);
        a.qkv = arena.take<Float>(rows * 3 * C);
        a.attention = arena.take<Float>(rows * C);
        a.middle = arena.take<Float>(rows * C);
        a.norm2 = arena.take<Float>(rows * C);
        a.up = arena.take<Float>(rows * 4 * C);
        for (float** statistic : {&a.mean1, &a.rstd1, &a.mean2, &a.rstd2}) *statistic = arena.take<float>(rows);
        a.lse = arena.take<float>(rows * NH);
        a.gelu = is_first || options_.recompute == Recompute::none ? arena.take<Float>(rows * 4 * C) : blocks_[0].gelu;
      } else {
        a = blocks_[0];  // one set of buffers serves every block
      }
      a.input = arena.take<Float>(rows * C);
    }
    final_input_ = arena.take<Float>(rows * C);
    final_norm_ = arena.take<Float>(rows * C);
    final_mean_ = arena.take<float>(rows);
    final_rstd_ = arena.take<float>(rows);
    logits_ = arena.take<Float>(size_t(logit_rows()) * Vp);
    losses_ = arena.take<float>(rows);
  }

  void lay_out_workspace(Arena& arena) {
    const auto [B, T, R, C, NH, HS, V, Vp] = largest();
    const size_t rows = size_t(R);
    branch_ = dnarrow_ = dfinal_norm_ = arena.take<Float>(rows * C);  // never needed at the same time
    dstream_ = arena.take<Float>(rows * C);
    dwide_ = arena.take<Float>(rows * 4 * C);
    row_dots_ = arena.take<float>(rows * NH);
    reductions_ = arena.take<float>(std::max(layernorm_workspace(R, C), linear_workspace(R, 4 * C)));
    lay_out_sums(arena);
    gemm_workspace_ = arena.take<char>(gemm_workspace_bytes);
    attention_workspace_bytes_ = library_attention_workspace_bytes();
    attention_workspace_ = arena.take<char>(attention_workspace_bytes_);
  }

  ParameterStore<Float> store_;
  std::vector<BlockActivations<Float>> blocks_;
  Float *final_input_, *final_norm_, *logits_;           // (R,C) (R,C) (logit_rows,Vp)
  float *final_mean_, *final_rstd_, *losses_;            // (R) each
  Float *branch_, *dnarrow_, *dfinal_norm_;              // (R,C) each; all three are the same memory
  Float *dstream_, *dwide_;                              // (R,C) (R,4C)
  float *row_dots_, *reductions_;                        // (B,NH,T), workspace of reductions
  char *gemm_workspace_, *attention_workspace_;          // used by the libraries
  size_t attention_workspace_bytes_;
};
