// Attention of a batch on a rank. Its own rows hold all keys that they see (AttentionOfRows), unless a room says otherwise: ranks
// share the sequences, or a text's earlier keys are kept. Who computes it: our own kernels, a room's, or a library.
#pragma once

#include <string>

#include "gpt/layer_context.cuh"
#include "gpt/model_options.h"
#include "gpt/products.cuh"
#include "kernels/attention/attention.cuh"

// own: square_attention() of this rank's rows of a micro-batch, R rows of c channels; largest: of the largest micro-batch
template <class Float>
class AttentionOfRows {
 public:
  explicit AttentionOfRows(cudaStream_t stream) : stream_(stream) {}
  virtual ~AttentionOfRows() = default;

  // Asks a library for attention of all shapes that these rows need. Returns an empty string, or why it can't do one
  // of them; then our own kernels do.
  virtual std::string ask_library(const AttentionSizes& largest) { return plan_attention<Float>(largest, strides(largest)); }
  // The largest attention that this rank computes at a time.
  virtual AttentionSizes largest_attention(const AttentionSizes& largest) const { return largest; }

  // A forward pass begins. When text is generated, it adds `added` tokens to the `cached` tokens of each text.
  virtual void begin_forward(const Positions&, int /*cached*/, int /*added*/) {}
  // The buffer into which the caller computes qkv (R,3c) of this rank's rows, before forward() with the same `kept`.
  virtual Float* rows_of_qkv(Float* kept) const { return kept; }
  // The rows of q, k and v in the buffer that forward() has kept.
  virtual QkvHeads<const Float> kept_qkv(const Float* kept, const AttentionSizes& own) const {
    return packed_qkv(kept, own.queries, own.channels());
  }
  // Does forward() keep all rows of some heads for backward()? Else it keeps this rank's rows of all heads.
  virtual bool keeps_heads() const { return false; }
  // Do forward() and backward() store the maximum of their outputs (kernels/device/maximum.cuh)? A library does not.
  virtual bool leaves_maximum(const AttentionSizes& own) const { return !attention_is_planned<Float>(own, strides(own)); }

  // out (R,c) from rows_of_qkv(qkv). Keeps qkv and lse for backward, and heads_out if keeps_heads(). layer: number
  virtual void forward(Float* out, Float* /*heads_out*/, float* lse, Float* qkv, int /*layer*/, const AttentionSizes& own,
                       const AttentionBody<Float>& body, float* maximum) {
    const Float* rows = qkv;
    attention_forward(out, lse, rows, own.batch, own.queries, own.heads, own.head_size, stream_, body, maximum);
  }
  // dqkv (R,3c) from dout (R,c) and the tensors of forward. row_dots: workspace, as large as lse
  virtual void backward(Float* dqkv, float* row_dots, const Float* dout, const Float* out, const Float* /*heads_out*/, const Float* qkv,
                        const float* lse, const AttentionSizes& own, const AttentionBody<Float>& body, float* maximum) {
    attention_backward(dqkv, row_dots, dout, out, qkv, lse, own.batch, own.queries, own.heads, own.head_size, stream_, body, maximum);
  }

 protected:
  static AttentionStrides strides(const AttentionSizes& own) { return packed_strides(own.queries, own.channels()); }
  cudaStream_t stream_;
};

// The tensors that attention keeps between forward and backward.
template <class Float>
struct AttentionActivations {
  Float* qkv;       // (R,3c)  or, where ranks split heads: all rows of some heads
  Float* out;       // (R,c)
  Float* of_heads;  // (R,c)  where ranks split heads: the result, all rows of the same heads
  float* lse;       // (B,NH/N,T) log-sum-exp of the scores
};

template <class Float>
class Attention {
 public:
  // kernels: a room's, which come first; null: a library is asked by its name, or by auto in training; ours do the rest
  Attention(LayerContext<Float>& context, AttentionOfRows<Float>& rows, AttentionKernels<Float>* kernels, const ModelOptions& options,
            const Mesh& mesh, const AttentionSizes& largest)
      : on_(context), rows_(rows), is_training_(options.store.training), largest_(largest) {
    take_library_attention_workspace_bytes();  // what other models of this process need
    const std::string& wanted = options.attention;
    const bool asks_library = !kernels && !options.elsewhere && (wanted == "cudnn" || (wanted == "auto" && is_training_));
    for (const bool sends_data : {false, true}) {  // may data-parallel ranks send in the pass?
      if (!asks_library || !problem_.empty()) break;
      const SmMargin leaves(mesh.sm_margin(sends_data));
      problem_ = rows.ask_library(largest);
    }
    library_bytes_ = options.elsewhere ? options.elsewhere->attention : take_library_attention_workspace_bytes();
    if (kernels && !options.elsewhere) problem_ = kernels->problem(largest.head_size);
    if (!kernels && wanted != "auto" && wanted != "cudnn" && wanted != "own") problem_ = "this build has no such kernels for this --dtype";
    if (problem_.empty()) body_.kernels = kernels;
    name_ = body_.kernels ? kernels->name() : asks_library && problem_.empty() ? "cudnn" : "own";
  }
  // The reason why the body that was asked for can't do this; empty: it can.
  const std::string& problem() const { return problem_; }
  const std::string& name() const { return name_; }  // of who computes it, as --attention has it

  void lay_out_activations(Arena& arena, AttentionActivations<Float>& a) const {
    const size_t rows = size_t(on_.R), c = size_t(on_.c());
    a.qkv = arena.take<Float>(rows * 3 * c);
    a.out = arena.take<Float>(rows * c);
    a.of_heads = rows_.keeps_heads() ? arena.take<Float>(rows * c) : nullptr;
    a.lse = arena.take<float>(rows * size_t(largest_.heads));
  }
  void lay_out_workspace(Arena& arena) {
    row_dots_ = arena.take<float>(size_t(on_.R) * size_t(largest_.heads));
    body_.library = {arena.take<char>(library_bytes_), library_bytes_};
    if (body_.kernels && is_training_) body_.kernels->lay_out(arena, rows_.largest_attention(largest_));
  }

  // A pass over `samples` samples begins.
  void begin(int samples, const Positions& positions) {
    now_ = square_attention(samples, positions.length, largest_.heads, largest_.head_size);
  }
  void begin_forward(int samples, const Positions& positions, int cached, int added) {
    begin(samples, positions);
    rows_.begin_forward(positions, cached, added);
  }

  // Where the product before forward() puts qkv (R,3c).
  Float* input(const AttentionActivations<Float>& a) const { return rows_.rows_of_qkv(a.qkv); }

  // a.out (R,c) from input(a). layer: its number
  void forward(int layer, const AttentionActivations<Float>& a) {
    const bool leaves_maximum = rows_.leaves_maximum(now_);
    float* const maximum = leaves_maximum ? on_.products->maximum_of(a.out, on_.elements()) : nullptr;
    rows_.forward(a.out, a.of_heads, a.lse, a.qkv, layer, now_, body_, maximum);
    if (!leaves_maximum) on_.products->find_maximum(a.out, on_.elements());
  }

  // dqkv (R,3c) from dout (R,c)
  void backward(Float* dqkv, const Float* dout, const AttentionActivations<Float>& a) {
    const size_t count = size_t(on_.R) * 3 * size_t(on_.c());
    on_.products->forget_maximum(dqkv, count);
    float* const maximum = rows_.leaves_maximum(now_) ? on_.products->maximum_of(dqkv, count) : nullptr;
    rows_.backward(dqkv, row_dots_, dout, a.out, a.of_heads, a.qkv, a.lse, now_, body_, maximum);
  }

 private:
  LayerContext<Float>& on_;
  AttentionOfRows<Float>& rows_;
  bool is_training_;
  AttentionSizes largest_, now_ = {};
  std::string problem_, name_;
  size_t library_bytes_;
  AttentionBody<Float> body_;
  float* row_dots_ = nullptr;  // (B,NH/N,T)
};
