// Attention of a batch on a rank: of its rows alone; of all ranks that share the sequences (context_parallel.cuh); or,
// when text is generated, of one token to all before it, whose keys and values are kept (text_cache.cuh). And who
// computes it: our own kernels, those for Hopper, or a library.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "extensions/context_parallel/context_parallel.cuh"
#include "extensions/generation/text_cache.cuh"
#include "gpt/layers.cuh"

struct AttentionOptions {
  ContextMethod method = ContextMethod::ring;
  bool library = false, hopper = false;  // which body is asked for; one of the two at most
  bool training = true;
  std::array<int, 2> sm_margins = {};  // of passes: where data-parallel ranks send nothing, and where they may
  std::optional<size_t> library_workspace = {};  // bytes, on a device that is not here
};

// What attention keeps between forward and backward.
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
  // largest: square_attention() of this rank's rows of a full micro-batch
  Attention(LayerContext<Float>& context, Mesh& mesh, const AttentionOptions& options, const AttentionSizes& largest)
      : on_(context), options_(options), largest_(largest), cp_(mesh.cp(), options.method, context.stream),
        texts_(mesh.cp(), options.method, context.stream) {
    for (const int margin : options.sm_margins) {
      if (!options.library || !problem_.empty()) break;
      const SmMargin leaves(margin);
      problem_ = cp_.plan(largest);
    }
    if (options.hopper && !options.library_workspace) problem_ = hopper_attention_problem<Float>(largest.head_size);
  }
  // Why what was asked for can't do this; empty: it can.
  const std::string& problem() const { return problem_; }

  void lay_out_activations(Arena& arena, AttentionActivations<Float>& a) const {
    const size_t rows = size_t(on_.R), c = size_t(on_.c());
    a.qkv = arena.take<Float>(rows * 3 * c);
    a.out = arena.take<Float>(rows * c);
    a.of_heads = cp_.keeps_heads() ? arena.take<Float>(rows * c) : nullptr;
    a.lse = arena.take<float>(rows * size_t(largest_.heads));
  }
  void lay_out_workspace(Arena& arena) {
    row_dots_ = arena.take<float>(size_t(on_.R) * size_t(largest_.heads));
    body_.library_bytes = options_.library_workspace.value_or(library_attention_workspace_bytes());
    body_.library_workspace = arena.take<char>(body_.library_bytes);
    body_.hopper = options_.hopper && problem_.empty();
    const bool needs_sums = body_.hopper && options_.training;
    body_.hopper_sums = arena.take<float>(needs_sums ? hopper_attention_workspace(cp_.largest_attention(largest_)) : 0);
  }
  void lay_out_exchange(Arena& arena) { cp_.lay_out(arena, largest_, options_.training); }
  // A cache for `texts` texts of at most `tokens` tokens each, in these layers.
  void lay_out_cache(Arena& arena, const std::vector<Layers>& chunks, int texts, int tokens) {
    texts_.lay_out(arena, chunks, texts, tokens, largest_.heads, largest_.head_size);
  }

  // A pass over `samples` samples begins.
  void begin(int samples, const Positions& positions) {
    now_ = square_attention(samples, positions.length, largest_.heads, largest_.head_size);
  }
  // A forward pass begins. When text is generated, it adds `added` tokens to the `cached` tokens of each text.
  void begin_forward(int samples, const Positions& positions, int cached, int added) {
    begin(samples, positions);
    texts_.begin(cached, added, positions);
  }

  // Where the product before forward() puts qkv (R,3c).
  Float* input(const AttentionActivations<Float>& a) const { return cp_.rows_of_qkv(a.qkv); }

  // a.out (R,c) from input(a). number: of the layer
  void forward(int number, const AttentionActivations<Float>& a) {
    if (texts_.decodes()) return texts_.attend(a.out, number, input(a), now_.batch);
    const bool leaves_maximum = cp_.leaves_maximum(now_);
    cp_.forward(a.out, a.of_heads, a.lse, a.qkv, now_, body_, leaves_maximum ? on_.fp8.maximum_of(a.out, on_.elements()) : nullptr);
    if (!leaves_maximum) on_.fp8.find_maximum(a.out, on_.elements());
    texts_.keep(number, cp_.kept_qkv(a.qkv, now_), now_.batch);
  }

  // dqkv (R,3c) from dout (R,c)
  void backward(Float* dqkv, const Float* dout, const AttentionActivations<Float>& a) {
    const size_t count = size_t(on_.R) * 3 * size_t(on_.c());
    on_.fp8.forget(dqkv, count);
    cp_.backward(dqkv, row_dots_, dout, a.out, a.of_heads, a.qkv, a.lse, now_, body_,
                 cp_.leaves_maximum(now_) ? on_.fp8.maximum_of(dqkv, count) : nullptr);
  }

 private:
  LayerContext<Float>& on_;
  AttentionOptions options_;
  AttentionSizes largest_, now_ = {};
  ContextParallel<Float> cp_;
  TextCache<Float> texts_;
  std::string problem_;
  AttentionBody body_;
  float* row_dots_ = nullptr;  // (B,NH/N,T)
};
