// The model: GPT-2 (Radford et al. 2019), forward and backward, in the order it is computed.
//
//   x = wte[token] + wpe[position]
//   L times:  x += attention(layernorm(x)) · W + b;   x += gelu(layernorm(x) · W + b) · W + b
//   logits = layernorm(x) · wteᵀ
//
// Symbols: B micro-batch, T sequence length, R = B·T rows, C channels, NH heads, V vocabulary, L layers. Float is the
// storage type of weights and activations: float, bf16 or half. Results come first, then operands. dX is the gradient
// of the loss with respect to X.
//
// N GPUs may compute a layer together. Each has r = R/N of the rows, and c = C/N of the columns between the two
// products of a pair (qkv and projection, up and down); gpt/products.cuh and gpt/attention.cuh say how. With one,
// r = R and c = C. stage.cuh runs the block, between the embedding and the head (gpt/ends.cuh).
//
// A LayerNorm does the addition before it, too: it reads both terms of the residual stream, and writes their sum beside
// its own result. So the stream goes from block to block as two tensors that are not added yet: Residual.
#pragma once

#include "gpt/attention.cuh"
#include "gpt/layers.cuh"
#include "gpt/model_options.h"
#include "gpt/weight_gradients.cuh"

// The activations that a block keeps between forward and backward.
template <class Float>
struct BlockActivations {
  Float* input;                           // (r,C)   the residual stream that enters the block
  Float* norm1;                           // (r,C)
  AttentionActivations<Float> attention;  // (R,3c) and more
  Float* middle;                          // (r,C)   the residual stream after attention
  Float* norm2;                           // (r,C)
  Float* up;                              // (R,4c)  before gelu
  Float* gelu;                            // (R,4c)
  NormStats stats1, stats2;               // of the two norms
};

// Gradients that a block's backward needs for a moment.
template <class Float>
struct BlockGradients {
  Float* narrow;  // (r,C) or (R,c), which are as large
  Float* up;      // (R,4c)
  Float* qkv;     // (R,3c)
};

// Memory for them. first: the first block's activations; where backward computes some again, all blocks share those.
template <class Float>
void lay_out(Arena& arena, BlockActivations<Float>& a, const BlockActivations<Float>& first, Recompute recompute,
             const LayerContext<Float>& on, const Attention<Float>& attention) {
  const bool is_first = &a == &first;
  const auto wide = [&] { return arena.take<Float>(size_t(on.R) * 4 * on.c()); };
  if (is_first || recompute != Recompute::block) {
    for (Float** rows : {&a.norm1, &a.middle, &a.norm2}) *rows = on.take_rows(arena);
    for (NormStats* stats : {&a.stats1, &a.stats2}) *stats = on.take_norm_stats(arena);
    attention.lay_out_activations(arena, a.attention);
    a.up = wide();
  } else {
    a = first;
  }
  a.gelu = is_first || recompute == Recompute::none ? wide() : first.gelu;
  a.input = on.take_rows(arena);
}
// narrow: memory for d.narrow. are_kept: a later pass (weight_pass) still needs d.up and d.qkv; else they share memory
template <class Float>
void lay_out(Arena& arena, BlockGradients<Float>& d, Float* narrow, const LayerContext<Float>& on, bool are_kept) {
  d.narrow = narrow;
  d.up = d.qkv = arena.take<Float>(size_t(on.R) * 4 * on.c());
  if (are_kept) d.qkv = arena.take<Float>(size_t(on.R) * 3 * on.c());
}

template <class Float>
class TransformerBlock {
 public:
  using Activations = BlockActivations<Float>;
  using Gradients = BlockGradients<Float>;

  TransformerBlock(LayerContext<Float>& on, Attention<Float>& attention)
      : unit(on.store, on.list), norm1(on, unit, norm1_weight, norm1_bias), norm2(on, unit, norm2_weight, norm2_bias),
        qkv(on, unit, qkv_weight, qkv_bias, 3 * on.c()), up(on, unit, up_weight, up_bias, 4 * on.c()),
        projection(on, unit, projection_weight, projection_bias, on.c()), down(on, unit, down_weight, down_bias, 4 * on.c()),
        attention(attention) {}

  // Returns the residual stream after the block. branch (r,C): where to write the second term of the result; it may be
  // the memory of x.branch.
  Residual<Float> forward(const Activations& a, const Residual<Float>& x, Float* branch) {
    forward_for_backward(a, x, branch);
    down.forward(branch, a.gelu);                              // (r,C)
    return {a.middle, branch};
  }

  // All that backward reads.
  void forward_for_backward(const Activations& a, const Residual<Float>& x, Float* branch) {
    norm1.forward(a.norm1, a.input, a.stats1, x);              // (r,C)   a.input = x.stream + x.branch, if there is a branch
    qkv.forward(attention.input(a.attention), a.norm1);        // (R,3c)
    attention.forward(layer(), a.attention);                   // (R,c)
    projection.forward(branch, a.attention.out);               // (r,C)
    norm2.forward(a.norm2, a.middle, a.stats2, {a.input, branch});  // (r,C)   a.middle = a.input + branch
    up.forward_gelu(a.gelu, a.up, a.norm2);                    // (R,4c)
  }

  void recompute_gelu(const Activations& a) { up.recompute_gelu(a.gelu, a.up); }

  // dx (r,C): on entry the gradient of the stream after the block, on return of the stream before it. The stream is a
  // sum, so dx is the gradient of both its terms, and each norm's backward adds its part. `later` computes the
  // gradients of the products: at once, or in a pass of its own. The last argument of add is an activation that nobody
  // needs after this block, so that `later` has memory for a gradient that it may have to keep.
  void backward(Float* dx, Activations& a, Gradients& d, WeightGradients<Float>& later) {
    down.input_gradient_gelu(d.up, dx, a.up);                  // (R,4c)
    later.announce(up, a.norm2);
    later.add(down, dx, a.gelu, a.middle);                     // (4c,C)
    up.start_input_gradient(d.narrow, d.up);                   // (r,C)   is there after finish
    later.add(up, d.up, a.norm2, a.up);                        // (C,4c)
    up.finish_input_gradient();
    norm2.backward(dx, d.narrow, a.middle, a.stats2);          // (r,C)

    projection.input_gradient(d.narrow, dx);                   // (R,c)
    later.announce(qkv, a.norm1);
    later.add(projection, dx, a.attention.out, a.input);       // (c,C)
    attention.backward(d.qkv, d.narrow, a.attention);          // (R,3c)
    qkv.start_input_gradient(d.narrow, d.qkv);                 // (r,C)   is there after finish
    later.add(qkv, d.qkv, a.norm1, a.attention.qkv);           // (C,3c)
    qkv.finish_input_gradient();
    norm1.backward(dx, d.narrow, a.input, a.stats1);           // (r,C)
  }

  int layer() const { return unit.number() - 1; }
  static std::vector<TensorRow> tensors(size_t channels) { return block_tensors(channels); }

  TransformerBlock(const TransformerBlock&) = delete;  // layers refer to its unit

  UnitInUse<Float> unit;
  LayerNorm<Float> norm1, norm2;
  ColumnLinear<Float> qkv, up;
  RowLinear<Float> projection, down;
  Attention<Float>& attention;
};
