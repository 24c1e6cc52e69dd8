// DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509): for attention alone, ranks that split the sequence split the
// heads instead. Before attention an all-to-all gives each rank all rows of its heads, after it another one gives back
// its own rows of all heads. Attention itself is computed as on one rank, bit for bit.
//
//              own rows, all heads              all rows, own heads             own rows, all heads
//   rank 0     rows 0   ┌ h0 h1 h2 h3           rows 0..1  h0 h1                rows 0    h0 h1 h2 h3
//   rank 1     rows 1   └ h0 h1 h2 h3   ──►     rows 0..1        h2 h3   ──►    rows 1    h0 h1 h2 h3
//                         qkv                              qkv, out                       out
//
// Rank r has the r-th run of each sample. Each rank sends each other one a single message, with the runs of all samples.
// Kernels put messages together and take them apart (extensions/context_parallel/kernels/split_heads.cuh). For all rows of own heads
// they put the runs of a sample side by side; with one sample they are so already. Backward exchanges dout and dqkv in the same
// way. All these exchanges are exposed.
//
// R = B·T/N rows, c channels of this tensor-parallel rank, w bytes of the storage type. Bytes that a rank sends:
//   forward and backward each (N−1)/N·4·R·c·w: q, k, v and out
// Ring attention sends (N−1)·2·R·c·w forward, so N/2 times as much, but behind its products, and it needs no heads to
// split. Memory, for all layers together: 6·R·c·w.
// Its events are tested by test_context_parallel.
#pragma once

#include <string>

#include "extensions/context_parallel/context_parallel.cuh"
#include "extensions/context_parallel/kernels/split_heads.cuh"

template <class Float>
class Ulysses final : public ContextParallel<Float> {
  using OfRows = AttentionOfRows<Float>;

 public:
  using ContextParallel<Float>::ContextParallel;

  void lay_out(Arena& arena, const AttentionSizes& largest, bool) override {
    const size_t values = 3 * size_t(largest.batch) * largest.queries * largest.channels();
    rows_ = arena.take<Float>(values);
    messages_ = arena.take<Float>(values);
  }

  std::string ask_library(const AttentionSizes& own) override { return OfRows::ask_library(of_own_heads(own)); }
  AttentionSizes largest_attention(const AttentionSizes& largest) const override { return of_own_heads(largest); }
  bool keeps_heads() const override { return true; }
  Float* rows_of_qkv(Float*) const override { return rows_; }
  QkvHeads<const Float> kept_qkv(const Float* kept, const AttentionSizes& own) const override {
    return OfRows::kept_qkv(kept, of_own_heads(own));
  }

  // out (R,c) from rows_of_qkv(). Keeps for backward all rows of own heads, in heads_out (B,T,c/N), lse (B,NH/N,T) and
  // qkv (B,T,3c/N).
  void forward(Float* out, Float* heads_out, float* lse, Float* qkv, int, const AttentionSizes& own, const AttentionBody<Float>& body,
               float* maximum) override {
    rows_to_heads(qkv, rows_, messages_, rows_, 3, own);
    OfRows::forward(heads_out, nullptr, lse, qkv, 0, of_own_heads(own), body, nullptr);
    heads_to_rows(out, heads_out, messages_, rows_, 1, own, maximum);
  }

  // dqkv (R,3c) from dout (R,c). row_dots: workspace (B,NH/N,T).
  void backward(Float* dqkv, float* row_dots, const Float* dout, const Float*, const Float* heads_out, const Float* qkv,
                const float* lse, const AttentionSizes& own, const AttentionBody<Float>& body, float* maximum) override {
    Float *const heads_dout = rows_, *const heads_dqkv = messages_;  // free: their messages have been sent by then
    rows_to_heads(heads_dout, dout, messages_, messages_ + size_t(own.batch) * own.queries * own.channels(), 1, own);
    OfRows::backward(heads_dqkv, row_dots, heads_dout, heads_out, nullptr, qkv, lse, of_own_heads(own), body, nullptr);
    heads_to_rows(dqkv, heads_dqkv, rows_, own.batch > 1 ? messages_ : rows_, 3, own, maximum);  // one sample is sent as it lies
  }

 private:
  using OfRows::stream_;
  using ContextParallel<Float>::ranks_;  // the Communicator of --cp

  // All rows of this rank's heads.
  AttentionSizes of_own_heads(const AttentionSizes& own) const {
    return square_attention(own.batch, own.queries * ranks_.size(), own.heads / ranks_.size(), own.head_size);
  }

  size_t ranks() const { return size_t(ranks_.size()); }
  size_t row_parts(int parts, const AttentionSizes& own) const { return size_t(own.batch) * own.queries * parts; }
  // Elements that a message has of a sample: the rows and the heads of one rank.
  size_t run(int parts, const AttentionSizes& own) const { return size_t(own.queries) * parts * own.channels() / ranks(); }

  // heads (B,T,parts,c/N) from the ranks' rows (R,parts,c), by way of messages (N,B,T/N,parts,c/N) that are sent and
  // messages that arrive. `arrived` may be the memory of `rows`.
  void rows_to_heads(Float* heads, const Float* rows, Float* sent, Float* arrived, int parts, const AttentionSizes& own) {
    swap_axes("split_heads", sent, rows, row_parts(parts, own), ranks(), own.channels() / ranks(), stream_);
    if (own.batch == 1) arrived = heads;
    ranks_.after(stream_);
    ranks_.all_to_all(arrived, static_cast<const Float*>(sent), own.batch * run(parts, own));
    ranks_.wait_for_all(stream_);
    if (own.batch > 1) swap_axes<Float>("join_runs", heads, arrived, ranks(), own.batch, run(parts, own), stream_);
  }

  // The inverse of rows_to_heads(). `arrived` may be the memory of `heads`, if there are several samples.
  void heads_to_rows(Float* rows, const Float* heads, Float* sent, Float* arrived, int parts, const AttentionSizes& own,
                     float* maximum) {
    if (own.batch > 1) swap_axes("split_runs", sent, heads, own.batch, ranks(), run(parts, own), stream_);
    ranks_.after(stream_);
    ranks_.all_to_all(arrived, own.batch > 1 ? sent : heads, own.batch * run(parts, own));
    ranks_.wait_for_all(stream_);
    swap_axes<Float>("join_heads", rows, arrived, ranks(), row_parts(parts, own), own.channels() / ranks(), stream_, maximum);
  }

  Float *rows_ = nullptr, *messages_ = nullptr;  // (R,3c) each
};
