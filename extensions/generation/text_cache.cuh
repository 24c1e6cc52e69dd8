// The keys and values of the texts that are generated, and attention of a new token to those before it. Ranks that
// split the sequence (extensions/context_parallel/context_parallel.cuh) share the cache:
//
//   ring      each keeps the keys of some tokens, of all heads (KeptTokens, extensions/context_parallel/sequence_split.h)
//   Ulysses   each keeps the keys of all tokens, of some heads
//
// The prompt is computed as in training, and each rank keeps the keys of its own rows. Then every rank computes the row
// of each new token, and attends from it to the keys that it keeps. The parts of all ranks are gathered, and merged in
// rank order (extensions/generation/kernels/decode_attention.cuh), so that all have the same bits. A head without keys on a rank
// adds nothing there.
//
// Bytes that a rank sends for each layer and token: (N−1) · B·NH·(HS+1) · 4
// Its events are tested by test_meshes.
#pragma once

#include <map>
#include <vector>

#include "extensions/context_parallel/sequence_split.h"
#include "extensions/generation/kernels/decode_attention.cuh"
#include "gpt/attention.cuh"
#include "gpt/collectives.cuh"
#include "gpt/shapes.h"
#include "kernels/device/memory.cuh"

template <class Float>
class TextCache final : public AttentionOfRows<Float> {
 public:
  // inner: attention of the prompt, and in training
  TextCache(AttentionOfRows<Float>& inner, Communicator& ranks, ContextMethod method, cudaStream_t stream)
      : AttentionOfRows<Float>(stream), inner_(inner), ranks_(ranks), shares_keys_(method == ContextMethod::ring) {}

  // Reserves memory for these layers, and for `texts` texts of at most `positions` positions.
  void lay_out(Arena& arena, const std::vector<Layers>& chunks, int texts, int positions, int heads, int head_size) {
    const int of_tokens = shares_keys_ ? ranks_.size() : 1, own_heads = shares_keys_ ? heads : heads / ranks_.size();
    const int room = positions / of_tokens;
    for (const Layers& chunk : chunks)
      for (int layer = chunk.first; layer < chunk.end(); ++layer) {
        const size_t count = size_t(texts) * room * own_heads * head_size;
        caches_[layer] = {.keys = arena.take<Float>(count), .values = arena.take<Float>(count), .heads = own_heads,
                          .head_size = head_size, .positions = room,
                          .first_head = shares_keys_ ? 0 : ranks_.rank() * own_heads, .all_heads = heads};
      }
    workspace_ = arena.take<float>(decode_workspace(texts, room, own_heads, head_size));
    if (ranks_.size() > 1) parts_ = arena.take<float>(size_t(ranks_.size()) * attention_part(texts, heads, head_size));
  }

  std::string ask_library(const AttentionSizes& largest) override { return inner_.ask_library(largest); }
  AttentionSizes largest_attention(const AttentionSizes& largest) const override { return inner_.largest_attention(largest); }
  Float* rows_of_qkv(Float* kept) const override { return inner_.rows_of_qkv(kept); }
  QkvHeads<const Float> kept_qkv(const Float* kept, const AttentionSizes& own) const override { return inner_.kept_qkv(kept, own); }
  bool keeps_heads() const override { return inner_.keeps_heads(); }
  bool leaves_maximum(const AttentionSizes& own) const override { return !decodes_ && inner_.leaves_maximum(own); }

  // cached = 0: the tokens are the prompt, and this rank computes the rows at `positions`; rows behind the prompt are padding.
  // Else the pass computes one token of each text.
  void begin_forward(const Positions& positions, int cached, int added) override {
    inner_.begin_forward(positions, cached, added);
    decodes_ = cached > 0;
    if (!decodes_) kept_ = shares_keys_ ? KeptTokens{positions, ranks_.size(), ranks_.rank()} : KeptTokens{neighbours(0), 1, 0};
    first_ = kept_.before(cached);
    count_ = kept_.before(cached + added) - first_;
  }

  void forward(Float* out, Float* heads_out, float* lse, Float* qkv, int layer, const AttentionSizes& own, const AttentionBody<Float>& body,
               float* maximum) override {
    if (decodes_) return attend(out, layer, rows_of_qkv(qkv), own.batch);
    inner_.forward(out, heads_out, lse, qkv, layer, own, body, maximum);
    keep(layer, kept_qkv(qkv, own), own.batch);
  }
  void backward(Float* dqkv, float* row_dots, const Float* dout, const Float* out, const Float* heads_out, const Float* qkv,
                const float* lse, const AttentionSizes& own, const AttentionBody<Float>& body, float* maximum) override {
    inner_.backward(dqkv, row_dots, dout, out, heads_out, qkv, lse, own, body, maximum);
  }

 private:
  // Keeps keys and values of the prompt. qkv: the rows that this rank has had in attention.
  void keep(int layer, const QkvHeads<const Float>& qkv, int texts) {
    if (count_ > 0) append_to_cache(caches_.at(layer), qkv, texts, count_, first_, stream_);
  }

  // out (B,c): attention of one token of each text, whose row qkv (B,3c) all ranks have, to itself and all tokens
  // before it.
  void attend(Float* out, int layer, const Float* qkv, int texts) {
    const KeyValueCache<Float>& cache = caches_.at(layer);
    const int heads = cache.all_heads, head_size = cache.head_size;
    keep(layer, packed_qkv(qkv + cache.first_head * head_size, 1, heads * head_size), texts);
    if (ranks_.size() == 1) return decode_attention(out, qkv, cache, texts, first_ + count_, workspace_, stream_);
    const size_t part = attention_part(texts, heads, head_size);
    float* const own_part = parts_ + size_t(ranks_.rank()) * part;
    decode_attention<Float, true>(own_part, qkv, cache, texts, first_ + count_, workspace_, stream_);
    ranks_.after(stream_);
    ranks_.all_gather(parts_, own_part, part);
    ranks_.wait_for_all(stream_);
    merge_attention(out, parts_, ranks_.size(), texts, heads, head_size, stream_);
  }

  using AttentionOfRows<Float>::stream_;
  AttentionOfRows<Float>& inner_;
  Communicator& ranks_;
  bool shares_keys_;
  std::map<int, KeyValueCache<Float>> caches_;  // by layer
  float *workspace_ = nullptr, *parts_ = nullptr;
  KeptTokens kept_ = {};
  // Tokens that this rank has kept before a pass, and tokens that the pass adds.
  int first_ = 0, count_ = 0;
  bool decodes_ = false;
};
