// Context parallelism: N ranks split the sequence, so that a sample may be N times as long as one rank has memory for.
// All layers except attention work on rows, and need only the position of each row (kernels/positions.h). Attention
// needs the keys of all rows, in one of two ways:
//
//   ring      keys travel from rank to rank while attention to the last ones is computed     extensions/context_parallel/ring_attention.cuh
//   ulysses   for attention alone, ranks split the heads instead of the rows                 extensions/context_parallel/ulysses.cuh
//
// Both give the same results as one rank with whole sequences. Sent by a rank, in a layer and micro-batch of R = B·T/N
// rows and c channels, w bytes each:
//
//              forward              backward                 hidden behind      needs
//   ring       (N−1)·2·R·c·w        (N−1)·2·R·c·(w + 4)      its own products   2·N divides T
//   ulysses    (N−1)/N·4·R·c·w      (N−1)/N·4·R·c·w          nothing            N divides T and the heads
//
// A step of the ring computes 2·R·c·T/N FLOPs forward for 2·R·c·w bytes. So it hides where T/N is at least
// w·(FLOP/s)/(bytes/s): in 16 bits, with 500 TFLOP/s of attention, 2,200 rows over NVLink's 450 GB/s, and 20,000 over
// 50 GB/s between nodes.
#pragma once

#include "extensions/context_parallel/ring_attention.cuh"
#include "extensions/context_parallel/sequence_split.h"
#include "extensions/context_parallel/ulysses.cuh"
#include "gpt/attention.cuh"

template <class Float>
class ContextParallel final : public AttentionOfRows<Float> {
 public:
  // The model runs on `stream`.
  ContextParallel(Communicator& ranks, ContextMethod method, cudaStream_t stream)
      : AttentionOfRows<Float>(stream), ranks_(ranks), method_(method), ring_(ranks, stream), ulysses_(ranks, stream) {}

  int size() const { return ranks_.size(); }

  // largest: of this rank's rows (B, T/N) and the heads of this tensor-parallel rank. training: backward too.
  void lay_out(Arena& arena, const AttentionSizes& largest, bool training) {
    if (size() == 1) return;
    if (is_ring()) ring_.lay_out(arena, largest, training);
    else ulysses_.lay_out(arena, largest);
  }

  std::string ask_library(const AttentionSizes& largest) override { return is_ring() ? ring_.plan(largest) : ulysses_.plan(largest); }
  AttentionSizes largest_attention(const AttentionSizes& largest) const override {
    return keeps_heads() ? ulysses_.of_own_heads(largest) : largest;
  }
  bool keeps_heads() const override { return !is_ring() && size() > 1; }
  Float* rows_of_qkv(Float* kept) const override { return keeps_heads() ? ulysses_.rows_of_qkv() : kept; }
  QkvHeads<const Float> kept_qkv(const Float* kept, const AttentionSizes& own) const override {
    const int heads = keeps_heads() ? size() : 1;  // are divided by this, and rows multiplied
    return packed_qkv(kept, own.queries * heads, own.channels() / heads);
  }
  bool leaves_maximum(const AttentionSizes& own) const override { return size() > 1 || AttentionOfRows<Float>::leaves_maximum(own); }

  // Keeps for backward: qkv, of this rank's rows (R,3c) or heads (B,T,3c/N); lse (B,NH,T/N) or (B,NH/N,T); and, if
  // keeps_heads(), heads_out (B,T,c/N).
  void forward(Float* out, Float* heads_out, float* lse, Float* qkv, int layer, const AttentionSizes& own,
               const AttentionBody& body, float* maximum) override {
    if (size() == 1) AttentionOfRows<Float>::forward(out, heads_out, lse, qkv, layer, own, body, maximum);
    else if (is_ring()) ring_.forward(out, lse, qkv, own, body, maximum);
    else ulysses_.forward(out, heads_out, lse, qkv, own, body, maximum);
  }
  void backward(Float* dqkv, float* row_dots, const Float* dout, const Float* out, const Float* heads_out, const Float* qkv,
                const float* lse, const AttentionSizes& own, const AttentionBody& body, float* maximum) override {
    if (size() == 1) AttentionOfRows<Float>::backward(dqkv, row_dots, dout, out, heads_out, qkv, lse, own, body, maximum);
    else if (is_ring()) ring_.backward(dqkv, row_dots, dout, out, qkv, lse, own, body, maximum);
    else ulysses_.backward(dqkv, row_dots, dout, heads_out, qkv, lse, own, body, maximum);
  }

 private:
  bool is_ring() const { return method_ == ContextMethod::ring; }

  Communicator& ranks_;
  ContextMethod method_;
  RingAttention<Float> ring_;
  Ulysses<Float> ulysses_;
};
