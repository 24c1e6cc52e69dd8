// The model: GPT-2 (Radford et al. 2019), forward and backward, in the order it is computed.
//
//   x = wte[token] + wpe[position]
//   L times:  x += attention(layernorm(x)) · W + b;   x += gelu(layernorm(x) · W + b) · W + b
//   logits = layernorm(x) · wteᵀ
//
// Symbols: B micro-batch, T sequence length, R = B·T rows, C channels, NH heads, HS = C/NH, V vocabulary, L layers. Float
// is the storage type of weights and activations: float, bf16 or half. Every kernel takes its results first, then its
// operands, then the sizes.
//
// N ranks may split each layer between them (tp_: parallel/tensor_parallel.cuh). Each has r = R/N of the rows, c = C/N
// channels of NH/N heads, and Vs rows of wte: what lies between the two products of a pair is split by columns, the
// rest by rows. With one rank r = R, c = C, Vs is V rounded up to a multiple of 128, and tp_ only calls the product that it
// is given.
//
// Ranks may also split the sequences between them (cp_: parallel/context_parallel.cuh). Then T counts this rank's tokens of
// a sample, and only attention, the positions and the text that is generated know of the others.
//
// p pipeline stages may split the layers between them: a pass computes one chunk of layers, which begins with what the stage
// before has sent, or with the embedding, and ends by sending to the stage after, or with the head (parallel/pipeline.h).
//
// The LayerNorm after a residual addition does that addition, too (kernels/layernorm.cuh): it reads both terms of the
// sum, and writes the sum beside its own result. So the residual stream is passed from block to block as two tensors
// that are not added yet: Residual.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "model.cuh"
#include "kernels/cross_entropy.cuh"
#include "kernels/embedding.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/linear.cuh"
#include "kernels/residual.cuh"
#include "kernels/vocabulary_cross_entropy.cuh"
#include "parallel/context_parallel.cuh"
#include "parallel/stage_links.cuh"
#include "parallel/tensor_parallel.cuh"
#include "parallel/text_cache.cuh"
#include "parallel/zero.cuh"

// The residual stream, as the sum of two tensors.
template <class Float>
struct Residual {
  const Float* stream;  // (r,C)
  const Float* branch;  // (r,C)  output of the last attention or MLP, to be added to `stream`; null: nothing to add
};

// What a block keeps between forward and backward. If a pass for the weights' gradients follows (Work::weight), backward
// leaves it the gradients that it needs in the place of four activations that nobody needs any more.
template <class Float>
struct BlockActivations {
  Float* input;      // (r,C)    the residual stream that enters the block   then dout of projection
  Float* norm1;      // (r,C)
  Float* qkv;        // (R,3c)   with Ulysses: all rows of some heads        then dqkv
  Float* attention;  // (R,c)
  Float* heads_out;  // (R,c)    with Ulysses alone: attention, all rows of the same heads
  Float* middle;     // (r,C)    the residual stream after attention         then dout of down
  Float* norm2;      // (r,C)
  Float* up;         // (R,4c)   before gelu                                 then dup
  Float* gelu;       // (R,4c)
  float *mean1, *rstd1, *mean2, *rstd2;  // (r) each
  float* lse;        // (B,NH/N,T) log-sum-exp of the attention scores
};

// What the model keeps of one micro-batch and one chunk of layers between forward and backward. The final norm's are used
// in the last chunk only.
template <class Float>
struct Activations {
  std::vector<BlockActivations<Float>> blocks;
  Float *final_input, *final_norm;  // (r,C) each: input and output of the last LayerNorm
  float *final_mean, *final_rstd;   // (r) each
};

// The gradients of a unit's tensors. accumulate: add to what is there.
struct UnitGradients : UnitTensors<float> {
  bool accumulate;
};

template <class Float>
class GPT final : public Model {
 public:
  GPT(const ModelOptions& options, Mesh& mesh, cudaStream_t stream)
      : Model(options, mesh, stream), store_(list_, options.store, memory_, mesh, stream),
        tp_(mesh.tp(), options.tp_pieces, stream), cp_(mesh.cp(), options.context_method, stream), links_(mesh, stream),
        texts_(mesh.cp(), options.context_method, stream) {
    gemm_choices().use_library(gemm_library());
    if (has_library_attention) library_attention_ = library_attention_name();
    if (options.library_attention) attention_problem_ = cp_.plan(largest().attention());
    if (options.hopper_attention && !options.elsewhere)
      attention_problem_ = hopper_attention_problem<Float>(options.shape.head_size());
    memory_.add("activations", [this](Arena& arena) { lay_out_activations(arena); });
    memory_.add("workspace", [this](Arena& arena) { lay_out_workspace(arena); });
    if (tp_.size() > 1) memory_.add("tensor parallel", [this](Arena& arena) { lay_out_tensor_parallel(arena); });
    if (cp_.size() > 1)
      memory_.add("context parallel", [this](Arena& arena) {
        cp_.lay_out(arena, largest().attention(), options_.store.training);
      });
    if (is_pipeline()) memory_.add("stage buffers", [this](Arena& arena) { links_.lay_out(arena, largest().elements()); });
    if (options.cached_positions)
      memory_.add("kv cache", [this](Arena& arena) {
        texts_.lay_out(arena, list_.chunks(), options_.samples, options_.cached_positions, largest().NH, largest().HS);
      });
    if (mesh.is_imagined()) return;
    if (!options.store.training) memory_.cure = "fewer --samples, a shorter --seq-len, or more ranks with --tp or --pp";
    memory_.allocate();
    store_.clear();
    if (no_bias_) CUDA_CHECK(cudaMemsetAsync(no_bias_, 0, size_t(options.shape.channels) * sizeof(Float), stream));
  }
  ~GPT() {
    cudaStreamSynchronize(stream_);
    use_gemm_workspace(nullptr);
    use_library_attention_workspace(nullptr, 0);
    use_hopper_attention(false, nullptr);
  }

  Parameters& store() override { return store_; }

 private:
  // The sizes of one batch on this rank, NH being its heads. largest() gives those of a full micro-batch, for which memory
  // is allocated. In sampling B·T need not be a multiple of N: then R is B·T rounded up.
  struct Sizes {
    int B, T, R, r, C, c, NH, HS, Vs;
    size_t elements() const { return size_t(r) * size_t(C); }  // of this rank's rows of the residual stream
    AttentionSizes attention() const { return square_attention(B, T, NH, HS); }
  };
  Sizes sizes(int batch_size, const Positions& positions) const {
    const ModelShape& s = options_.shape;
    const int N = tp_.size(), T = positions.length, R = round_up(batch_size * T, N);
    return {batch_size, T, R, R / N, s.channels, s.channels / N, s.heads / N, s.head_size(), list_.vocabulary_rows()};
  }
  Sizes sizes(const Batch& batch) const { return sizes(batch.batch_size, batch.positions); }
  Sizes largest() const { return sizes(options_.micro_batch, positions()); }

  bool is_pipeline() const { return mesh_.shape().pp > 1; }
  bool uses_hopper_attention() const { return options_.hopper_attention && attention_problem_.empty(); }
  const Layers& chunk_of(const Batch& batch) const { return list_.chunks()[size_t(batch.action.chunk)]; }
  bool is_last(const Layers& chunk) const { return chunk.end() == options_.shape.layers; }
  Activations<Float>& activations_of(const Batch& batch) { return activations_[size_t(batch.action.slot)]; }

  // What only one rank may add to a sum over the tensor-parallel ranks: the others add zeros.
  const Float* once(const Float* bias) const { return tp_.rank() == 0 ? bias : no_bias_; }

  void post_receives(const Batch& batch) override { links_.post(batch.action, sizes(batch).elements()); }

  // ---- forward

  void forward_pass(const Batch& batch) override {
    use_gemm_workspace(gemm_workspace_);  // another model of this process may have set its own
    use_library_attention_workspace(attention_workspace_, attention_workspace_bytes_);
    use_hopper_attention(uses_hopper_attention(), hopper_workspace_);
    const Sizes s = sizes(batch);
    const Layers& chunk = chunk_of(batch);
    Activations<Float>& a = activations_of(batch);
    texts_.begin(batch.cached, batch.added, batch.positions);
    if (chunk.first == 0) embedding(batch, a.blocks[0].input, s);                       // (r,C)
    else std::swap(a.blocks[0].input, links_.received(Message::activation));            // (r,C)
    Residual<Float> x = {a.blocks[0].input, nullptr};                                   // (r,C)
    for (int i = 0; i < chunk.count; ++i) x = block_forward(chunk.first + i, a.blocks[size_t(i)], x, s);
    if (!is_last(chunk)) {
      residual_forward(links_.to_send(Message::activation), x.stream, x.branch, s.r, s.C, stream_);  // (r,C)
      return links_.send(Message::activation, s.elements());
    }
    const auto norm = weights(list_.final_norm_unit(), Pass::forward);
    residual_layernorm_forward(a.final_norm, a.final_input, a.final_mean, a.final_rstd, x.stream, x.branch,
                               norm[final_norm_weight], norm[final_norm_bias], s.r, s.C, stream_);  // (r,C)
    if (!batch.training && batch.loss_weight > 0) head(batch);
  }

  void embedding(const Batch& batch, Float* out, const Sizes& s) {
    const auto w = weights(0, Pass::forward);
    const Float* const positions = tp_.rank() == 0 ? w[wpe] : nullptr;  // only one rank adds them to the sum
    tp_.then_scatter(out, exchange_, s.R, s.C, [&](Float* terms, Rows rows) {
      embedding_forward(rows.of(terms, s.C), batch.inputs + rows.first, w[wte], positions, list_.vocabulary(),
                        batch.positions, rows.first, rows.count, s.C, stream_);  // (R,C)
    });
  }

  // Returns the residual stream after the block.
  Residual<Float> block_forward(int layer, const BlockActivations<Float>& a, Residual<Float> x, const Sizes& s) {
    const TraceScope scope(layer);
    const auto w = weights(layer + 1, Pass::forward);
    block_activations(layer, w, a, x, s);
    row_parallel_forward(branch_, a.gelu, w[down_weight], w[down_bias], 4 * s.c, s);  // (r,C)
    return {a.middle, branch_};
  }

  // Computes a block's forward pass except its last product, whose result backward doesn't need.
  void block_activations(int layer, const UnitTensors<const Float>& w, const BlockActivations<Float>& a, Residual<Float> x,
                         const Sizes& s) {
    const auto [B, T, R, r, C, c, NH, HS, Vs] = s;
    residual_layernorm_forward(a.norm1, a.input, a.mean1, a.rstd1, x.stream, x.branch, w[norm1_weight], w[norm1_bias],
                               r, C, stream_);                                 // a.input = x.stream + x.branch  (r,C)
    tp_.gather_then(norm1_, a.norm1, R, C, [&](const Float* norm1, Rows rows) {
      linear_forward(rows.of(cp_.rows_of_qkv(a.qkv), 3 * c), rows.of(norm1, C), w[qkv_weight], w[qkv_bias], rows.count, C, 3 * c,
                     stream_);                                                                            // (R,3c)
    });
    attention(layer, a, s);                                                                               // (R,c)
    row_parallel_forward(branch_, a.attention, w[projection_weight], w[projection_bias], c, s);           // (r,C)
    residual_layernorm_forward<Float>(a.norm2, a.middle, a.mean2, a.rstd2, a.input, branch_, w[norm2_weight],
                                      w[norm2_bias], r, C, stream_);           // a.middle = a.input + branch_  (r,C)
    tp_.gather_then(norm2_, a.norm2, R, C, [&](const Float* norm2, Rows rows) {
      linear_gelu_forward(rows.of(a.gelu, 4 * c), rows.of(a.up, 4 * c), rows.of(norm2, C), w[up_weight], w[up_bias],
                          rows.count, C, 4 * c, stream_);                                                 // (R,4c)
    });
  }

  // Of the batch's tokens to each other; or, of one token, to all tokens before it, whose keys and values are in the cache.
  void attention(int layer, const BlockActivations<Float>& a, const Sizes& s) {
    if (texts_.decodes()) return texts_.attend(a.attention, layer, cp_.rows_of_qkv(a.qkv), s.B);
    cp_.forward(a.attention, a.heads_out, a.lse, a.qkv, s.attention());
    texts_.keep(layer, cp_.kept_qkv(a.qkv, s.attention()), s.B);
  }

  // The layer whose weight (inputs,C) is split by rows: out (r,C) = this rank's rows of Σ x·weight over the ranks, + bias.
  // x (R,inputs): this rank's columns.
  void row_parallel_forward(Float* out, const Float* x, const Float* weight, const Float* bias, int inputs, const Sizes& s) {
    tp_.then_scatter(out, exchange_, s.R, s.C, [&](Float* terms, Rows rows) {
      linear_forward(rows.of(terms, s.C), rows.of(x, inputs), weight, once(bias), rows.count, inputs, s.C, stream_);
    });
  }

  // Adds loss_weight · Σ losses to the loss. In training it also computes the gradients of its input, final_norm, and of
  // wte. It works on logit_rows() rows at a time, so that the logits (R,Vs) never lie in memory all at once.
  void head(const Batch& batch) {
    const auto [B, T, R, r, C, c, NH, HS, Vs] = sizes(batch);
    const Float* table = weights(0, Pass::backward)[wte];  // (Vs,C)  the pass that fetches no other unit after this one
    const Float* all = tp_.gather(norm1_, activations_of(batch).final_norm, R, C);  // (R,C)
    Float* const dall = tp_.size() == 1 ? dfinal_norm_ : exchange_;                             // (R,C)
    for (int begin = 0; begin < R; begin += logit_rows()) {
      const Rows rows = {begin, std::min(logit_rows(), R - begin)};
      const Float* x = rows.of(all, C);                                                // (rows,C)
      head_forward(logits_, x, table, rows.count, C, Vs, stream_);                     // (rows,Vs)
      losses(batch, rows);                                                             // in training logits_ := dlogits
      if (!batch.training) continue;
      const UnitGradients d = gradients(0);
      const TraceScope scope(-1, tp_.size() > 1);  // dall is a term of a sum
      head_backward(rows.of(dall, C), d[wte], logits_, x, table, rows.count, C, Vs, d.accumulate || begin > 0, stream_);
    }
    if (batch.training) tp_.then_scatter(dfinal_norm_, exchange_, R, C, [](Float*, Rows) {});
  }

  // The losses of these rows of the batch, from logits_ (rows,Vs).
  void losses(const Batch& batch, const Rows& rows) {
    const float* loss_scale = &store_.summary()->scale.value;
    const int *targets = batch.targets + rows.first, Vs = list_.vocabulary_rows();
    if (tp_.size() == 1)
      return cross_entropy(logits_, losses_, &sums_->loss, targets, rows.count, options_.shape.vocabulary, Vs,
                           batch.loss_weight, loss_scale, batch.training, stream_);
    RowStatistics* const own = statistics_ + size_t(tp_.rank()) * rows.count;
    vocabulary_statistics(own, logits_, targets, rows.count, list_.vocabulary(), Vs, stream_);
    tp_.gather_values(&statistics_->exponentials.exponent, &own->exponentials.exponent, 3 * size_t(rows.count));
    float* const loss = tp_.rank() == 0 ? &sums_->loss : nullptr;  // of the sum over all ranks one rank's is enough
    vocabulary_cross_entropy(logits_, losses_, loss, statistics_, tp_.size(), targets, rows.count,
                             list_.vocabulary(), Vs, batch.loss_weight, loss_scale, batch.training, stream_);
  }

  int logit_rows() const { return ceil_div(largest().R, options_.logit_chunks); }

  // ---- backward: dX is the gradient of the loss with respect to X. Those of weights are summed over micro-batches. In
  // Work::input those of the blocks' matrices are left to weight_pass().

  void backward_pass(const Batch& batch) override {
    const Sizes s = sizes(batch);
    const Layers& chunk = chunk_of(batch);
    Activations<Float>& a = activations_of(batch);
    if (is_last(chunk)) {
      clear_embedding_gradients(batch);
      head(batch);
      CUDA_CHECK(cudaMemsetAsync(dstream_, 0, s.elements() * sizeof(Float), stream_));
      final_norm_backward(a, s);
      if (!list_.is_first_stage()) store_.gradients_ready(0);
    } else {
      std::swap(dstream_, links_.received(Message::gradient));  // (r,C)
    }
    for (int i = chunk.count - 1; i >= 0; --i) {
      const int layer = chunk.first + i;
      const TraceScope scope(layer);
      const auto w = weights(layer + 1, Pass::backward);
      BlockActivations<Float>& block = a.blocks[size_t(i)];
      if (options_.recompute == Recompute::block) block_activations(layer, w, block, {block.input, nullptr}, s);
      if (options_.recompute == Recompute::gelu) gelu_forward(block.gelu, block.up, s.R, 4 * s.c, stream_);
      block_backward(layer, w, block, s, batch.action.work);
    }
    if (chunk.first == 0) return embedding_backward_pass(batch, s);
    std::swap(dstream_, links_.to_send(Message::gradient));
    links_.send(Message::gradient, s.elements());
  }

  void embedding_backward_pass(const Batch& batch, const Sizes& s) {
    if (!list_.is_last_stage()) clear_embedding_gradients(batch);
    // The head has already written its part of wte's gradient, so that is always added to: `accumulate` is for wpe.
    const UnitGradients d = gradients(0);
    const Float* dout = tp_.gather(exchange_, dstream_, s.R, s.C);  // (R,C)
    embedding_backward(d[wte], d[wpe], batch.inputs, batch.order, dout, list_.vocabulary(), s.B,
                       batch.positions, options_.shape.positions, s.C, d.accumulate, reductions_, stream_);
    store_.gradients_ready(0);
  }

  // Of the embedding's gradients a pipeline's first stage computes one part and its last stage another: the rest is zero.
  void clear_embedding_gradients(const Batch& batch) {
    if (!is_pipeline() || !batch.first) return;
    CUDA_CHECK(cudaMemsetAsync(gradients(0).data, 0, list_.units()[0].count * sizeof(float), stream_));
  }

  void final_norm_backward(const Activations<Float>& a, const Sizes& s) {
    const int unit = list_.final_norm_unit();
    const UnitGradients d = gradients(unit);
    layernorm_backward(dstream_, d[final_norm_weight], d[final_norm_bias], dfinal_norm_, a.final_input,
                       weights(unit, Pass::backward)[final_norm_weight], a.final_mean, a.final_rstd, s.r, s.C, d.accumulate,
                       reductions_, stream_);
    store_.gradients_ready(unit);
  }

  // At first dstream_ holds the gradient with respect to the residual stream after the block, in the end the one with
  // respect to the stream before the block. The backward of each LayerNorm adds to it, because the LayerNorm's input is
  // the stream. Gradients that are never needed at the same time share memory.
  void block_backward(int layer, const UnitTensors<const Float>& w, BlockActivations<Float>& a, const Sizes& s, Work work) {
    const auto [B, T, R, r, C, c, NH, HS, Vs] = s;
    const UnitGradients d = gradients(layer + 1);
    const bool with_weights = work != Work::input;
    const bool gathers = with_weights && options_.recompute != Recompute::block;  // recomputation has gathered norm1, norm2
    const auto weight_gradient = [&](int weight, int bias, const Float* dout, const Float* x, int inputs, int outputs) {
      if (with_weights) linear_weight_gradient(d, weight, bias, dout, x, inputs, outputs, s);
    };
    Float *const dup = dwide_, *const dqkv = dqkv_;                                     // (R,4c) (R,3c)
    Float *const dnorm2 = dnarrow_, *const dattention = dnarrow_, *const dnorm1 = dnarrow_;  // (r,C) (R,c) (r,C)

    const Float* dout = tp_.gather_then(exchange_, dstream_, R, C, [&](const Float* dout, Rows rows) {
      linear_gelu_gradient(rows.of(dup, 4 * c), rows.of(dout, C), w[down_weight], rows.of(a.up, 4 * c), rows.count, 4 * c, C,
                           stream_);
    });
    const Float* norm2 = tp_.start_gather(norm2_, a.norm2, R, C, !gathers);             // (R,C)
    weight_gradient(down_weight, down_bias, dout, a.gelu, 4 * c, C);
    column_parallel_backward(dnorm2, dup, w[up_weight], 4 * c, s,
                             [&] { weight_gradient(up_weight, up_bias, dup, norm2, C, 4 * c); });
    if (!with_weights) keep_dstream(0, s);
    layernorm_backward(dstream_, d[norm2_weight], d[norm2_bias], dnorm2, a.middle, w[norm2_weight], a.mean2, a.rstd2, r, C,
                       d.accumulate, reductions_, stream_);

    dout = tp_.gather_then(exchange_, dstream_, R, C, [&](const Float* dout, Rows rows) {
      linear_input_gradient(rows.of(dattention, c), rows.of(dout, C), w[projection_weight], rows.count, c, C, stream_);
    });
    const Float* norm1 = tp_.start_gather(norm1_, a.norm1, R, C, !gathers);             // (R,C)
    weight_gradient(projection_weight, projection_bias, dout, a.attention, c, C);
    cp_.backward(dqkv, row_dots_, dattention, a.attention, a.heads_out, a.qkv, a.lse, s.attention());
    column_parallel_backward(dnorm1, dqkv, w[qkv_weight], 3 * c, s,
                             [&] { weight_gradient(qkv_weight, qkv_bias, dqkv, norm1, C, 3 * c); });
    if (!with_weights) keep_dstream(1, s);
    layernorm_backward(dstream_, d[norm1_weight], d[norm1_bias], dnorm1, a.input, w[norm1_weight], a.mean1, a.rstd1, r, C,
                       d.accumulate, reductions_, stream_);
    if (with_weights) return store_.gradients_ready(layer + 1);
    // What weight_pass() needs takes the place of activations that it does not need.
    std::swap(a.middle, kept_[0]);
    std::swap(a.input, kept_[1]);
    std::swap(a.up, dwide_);
    std::swap(a.qkv, dqkv_);
  }

  // The gradients of the matrices, which the pass of Work::input has left out.
  void weight_pass(const Batch& batch) override {
    const Sizes s = sizes(batch);
    const Layers& chunk = chunk_of(batch);
    for (int i = chunk.count - 1; i >= 0; --i) {
      const int layer = chunk.first + i, R = s.R, C = s.C, c = s.c;
      const TraceScope scope(layer);
      const UnitGradients d = gradients(layer + 1);
      const BlockActivations<Float>& a = activations_of(batch).blocks[size_t(i)];
      const Float *down_dout = a.middle, *projection_dout = a.input, *dup = a.up, *dqkv = a.qkv;
      linear_weight_gradient(d, down_weight, down_bias, tp_.gather(exchange_, down_dout, R, C), a.gelu, 4 * c, C, s);
      linear_weight_gradient(d, up_weight, up_bias, dup, tp_.gather(norm2_, a.norm2, R, C), C, 4 * c, s);
      linear_weight_gradient(d, projection_weight, projection_bias, tp_.gather(exchange_, projection_dout, R, C), a.attention,
                             c, C, s);
      linear_weight_gradient(d, qkv_weight, qkv_bias, dqkv, tp_.gather(norm1_, a.norm1, R, C), C, 3 * c, s);
      store_.gradients_ready(layer + 1);
    }
  }

  // Copies dstream_ for weight_pass(), as the next LayerNorm adds to it.
  void keep_dstream(int number, const Sizes& s) {
    CUDA_CHECK(cudaMemcpyAsync(kept_[number], dstream_, s.elements() * sizeof(Float), cudaMemcpyDeviceToDevice, stream_));
  }

  // The gradients of a weight (inputs,outputs) and its bias. dout (R,outputs), x (R,inputs).
  void linear_weight_gradient(const UnitGradients& d, int weight, int bias, const Float* dout, const Float* x, int inputs,
                              int outputs, const Sizes& s) {
    ::linear_weight_gradient(d[weight], d[bias], dout, x, s.R, inputs, outputs, d.accumulate, reductions_, stream_);
  }

  // Backward of the layer whose weight (C,outputs) is split by columns: dx (r,C) = this rank's rows of Σ dout·weightᵀ over
  // the ranks. dout (R,outputs): of this rank's columns. meanwhile() is issued while the sums travel.
  template <class Meanwhile>
  void column_parallel_backward(Float* dx, const Float* dout, const Float* weight, int outputs, const Sizes& s,
                                Meanwhile meanwhile) {
    tp_.then_scatter(dx, exchange_, s.R, s.C, [&](Float* terms, Rows rows) {
      linear_input_gradient(rows.of(terms, s.C), rows.of(dout, outputs), weight, rows.count, s.C, outputs, stream_);
    }, meanwhile);
  }

  // ---- parameters

  UnitTensors<const Float> weights(int unit, Pass pass) { return {store_.acquire(unit, pass), list_.tensors_of(unit)}; }
  UnitGradients gradients(int unit) {
    const auto [data, accumulate] = store_.gradients(unit);
    return {{data, list_.tensors_of(unit)}, accumulate};
  }

  // ---- logits for the host

  std::vector<float> logits(int first, int count, int cp_rank) override {
    const auto [B, T, R, r, C, c, NH, HS, Vs] = sizes(last_);
    const bool has_head = list_.is_last_stage();
    const Float* table = has_head ? weights(0, Pass::backward)[wte] : nullptr;
    const Float* x = has_head ? tp_.gather(norm1_, activations_of(last_).final_norm, R, C) : nullptr;  // (R,C)
    const size_t V = size_t(options_.shape.vocabulary), all_shards = size_t(tp_.size()) * size_t(Vs);
    std::vector<float> all;
    std::vector<Float> row(V);
    for (int begin = first; begin < first + count; begin += logit_rows()) {
      const int rows = std::min(logit_rows(), first + count - begin);
      if (has_head) head_forward(logits_, x + size_t(begin) * C, table, rows, C, Vs, stream_);
      for (int i = 0; i < rows; ++i) {
        // The shards of all ranks, one after another. Padding comes last.
        Float* whole = logit_row_;  // (N·Vs)
        if (has_head) whole = tp_.gather_values(logit_row_, logits_ + size_t(i) * Vs, size_t(Vs));
        if (is_pipeline() || mesh_.cp().size() > 1) tell_all(whole, all_shards, cp_rank);
        copy_and_wait(row.data(), whole, V, cudaMemcpyDeviceToHost, stream_);
        std::transform(row.begin(), row.begin() + long(V), std::back_inserter(all), [](Float x) { return to_float(x); });
      }
    }
    return all;
  }

  // What the first rank of the last stage with this context-parallel rank has becomes what all ranks have.
  void tell_all(Float* values, size_t count, int cp_rank) {
    Communicator& world = mesh_.world();
    world.after(stream_);
    world.broadcast(values, count, world.size() - world.size() / mesh_.shape().pp + cp_rank * tp_.size());
    world.wait_for_all(stream_);
  }

  // ---- memory

  // Where activations are recomputed, one set of buffers serves all blocks of all micro-batches. A slot is as large as this
  // rank's largest chunk.
  void lay_out_activations(Arena& arena) {
    const auto [B, T, R, r, C, c, NH, HS, Vs] = largest();
    const size_t rows = size_t(R), own = size_t(r);
    const Recompute recompute = options_.recompute;
    int layers = 0;
    for (const Layers& chunk : list_.chunks()) layers = std::max(layers, chunk.count);
    activations_.resize(size_t(options_.slots));
    for (Activations<Float>& slot : activations_) {
      slot.blocks.resize(size_t(layers));
      for (BlockActivations<Float>& a : slot.blocks) {
        const BlockActivations<Float>& first = activations_[0].blocks[0];
        const bool is_first = &a == &first;
        if (!is_first && recompute == Recompute::block) {
          a = first;
        } else {
          a.norm1 = arena.take<Float>(own * C);
          a.qkv = arena.take<Float>(rows * 3 * c);
          a.attention = arena.take<Float>(rows * c);
          a.heads_out = cp_.keeps_heads() ? arena.take<Float>(rows * c) : nullptr;
          a.middle = arena.take<Float>(own * C);
          a.norm2 = arena.take<Float>(own * C);
          a.up = arena.take<Float>(rows * 4 * c);
          for (float** statistic : {&a.mean1, &a.rstd1, &a.mean2, &a.rstd2}) *statistic = arena.take<float>(own);
          a.lse = arena.take<float>(rows * NH);
          a.gelu = is_first || recompute == Recompute::none ? arena.take<Float>(rows * 4 * c) : first.gelu;
        }
        a.input = arena.take<Float>(own * C);
      }
      if (!list_.is_last_stage()) continue;
      for (Float** tensor : {&slot.final_input, &slot.final_norm}) *tensor = arena.take<Float>(own * C);
      for (float** statistic : {&slot.final_mean, &slot.final_rstd}) *statistic = arena.take<float>(own);
    }
    if (!list_.is_last_stage()) return;
    logits_ = arena.take<Float>(size_t(logit_rows()) * Vs);
    losses_ = arena.take<float>(size_t(logit_rows()));
  }

  void lay_out_workspace(Arena& arena) {
    const auto [B, T, R, r, C, c, NH, HS, Vs] = largest();
    const size_t rows = size_t(R), own = size_t(r);
    branch_ = dnarrow_ = dfinal_norm_ = arena.take<Float>(own * C);  // never needed at the same time
    dstream_ = arena.take<Float>(own * C);
    dwide_ = dqkv_ = arena.take<Float>(rows * 4 * c);
    if (options_.splits_backward) {
      dqkv_ = arena.take<Float>(rows * 3 * c);
      for (Float*& kept : kept_) kept = arena.take<Float>(own * C);
    }
    if (is_pipeline() && tp_.size() == 1) logit_row_ = arena.take<Float>(size_t(Vs));
    row_dots_ = arena.take<float>(rows * NH);
    reductions_ = arena.take<float>(std::max({layernorm_workspace(r, C), linear_workspace(R, std::max(4 * c, C)),
                                              embedding_workspace(R, C)}));
    lay_out_sums(arena);
    const auto& elsewhere = options_.elsewhere;
    gemm_workspace_ = arena.take<char>(elsewhere ? elsewhere->gemm : gemm_workspace_bytes);
    attention_workspace_bytes_ = elsewhere ? elsewhere->attention : library_attention_workspace_bytes();
    attention_workspace_ = arena.take<char>(attention_workspace_bytes_);
    const AttentionSizes attention = cp_.largest_attention(largest().attention());
    const bool needs_sums = uses_hopper_attention() && options_.store.training;
    hopper_workspace_ = arena.take<float>(needs_sums ? hopper_attention_workspace(attention) : 0);
  }

  void lay_out_tensor_parallel(Arena& arena) {
    const auto [B, T, R, r, C, c, NH, HS, Vs] = largest();
    for (Float** buffer : {&norm1_, &norm2_, &exchange_}) *buffer = arena.take<Float>(size_t(R) * C);
    no_bias_ = arena.take<Float>(size_t(C));
    statistics_ = arena.take<RowStatistics>(size_t(tp_.size()) * logit_rows());
    logit_row_ = arena.take<Float>(size_t(tp_.size()) * Vs);
  }

  ParameterStore<Float> store_;
  TensorParallel<Float> tp_;
  ContextParallel<Float> cp_;
  StageLinks<Float> links_;
  TextCache<Float> texts_;
  std::vector<Activations<Float>> activations_;          // by slot
  Float* logits_ = nullptr;                              // (logit_rows,Vs)
  float* losses_ = nullptr;                              // (logit_rows)
  Float *branch_, *dnarrow_, *dfinal_norm_;              // (r,C) each; all three are the same memory
  Float *dstream_, *dwide_, *dqkv_;                      // (r,C) (R,4c) (R,3c); the last two are the same, or:
  Float* kept_[2] = {};                                  // (r,C) each, if weight_pass() will need what they hold
  float *row_dots_, *reductions_;                        // (B,NH/N,T), workspace of reductions
  // Of tensor parallelism; with one rank there are none.
  Float *norm1_ = nullptr, *norm2_ = nullptr;            // (R,C) each: the rows of all ranks of norm1 and norm2
  Float* exchange_ = nullptr;                            // (R,C) rows on their way
  Float* no_bias_ = nullptr;                             // (C) zeros
  Float* logit_row_ = nullptr;                           // (N·Vs)
  RowStatistics* statistics_ = nullptr;                  // (N,logit_rows)
  char *gemm_workspace_, *attention_workspace_;          // used by the libraries
  size_t attention_workspace_bytes_;
  float* hopper_workspace_;
};
