// The two ends of the model, which share the table wte (V,C): the embedding, and the head with the loss. Where ranks share the
// layers, each has Vs rows of the table (TensorList::vocabulary_rows), and classes of their own override the virtual functions.
#pragma once

#include "gpt/layer_context.cuh"
#include "gpt/tokens.h"
#include "kernels/cross_entropy.cuh"
#include "kernels/embedding.cuh"
#include "kernels/linear.cuh"

template <class Float>
class Embedding {
 public:
  Embedding(LayerContext<Float>& context, UnitInUse<Float>& unit) : on_(context), unit_(unit) {}
  virtual ~Embedding() = default;

  // out (r,C) = wte[token] + wpe[position]
  virtual void forward(Float* out, const Tokens& tokens, const Positions& positions) {
    add_up(out, tokens, unit_.weight(wpe), positions, {0, on_.R});
  }

  // Gradients of both tables from dout (r,C). wte's gradient already holds the head's part (zeros on a stage without
  // the head), so this only ever adds to it.
  virtual void backward(const Float* dout, const Tokens& tokens, const Positions& positions, int samples) {
    embedding_backward(unit_.gradient(wte), unit_.gradient(wpe), tokens.inputs, tokens.order, dout, on_.list.vocabulary(), samples,
                       positions, on_.list.shape().positions, on_.C(), unit_.accumulates(), on_.reductions, on_.stream);
  }

 protected:
  // Some rows of the batch's tokens; out: the first of them. positions_table: null: no positions are added
  void add_up(Float* out, const Tokens& tokens, const Float* positions_table, const Positions& positions, const Rows& rows) {
    embedding_forward(out, tokens.inputs + rows.first, unit_.weight(wte), positions_table, on_.list.vocabulary(), positions, rows.first,
                      rows.count, on_.C(), on_.stream);
  }

  LayerContext<Float>& on_;
  UnitInUse<Float>& unit_;
};

// logits = x·wteᵀ, and the loss. It works on some rows at a time, so that the logits (R,Vs) never lie in memory all at
// once.
template <class Float>
class Head {
 public:
  Head(LayerContext<Float>& context, UnitInUse<Float>& unit) : on_(context), unit_(unit) {}
  virtual ~Head() = default;

  // at_once: rows of logits that memory is laid out for
  void lay_out_logits(Arena& arena, int at_once) {
    at_once_ = at_once;
    logits_ = arena.take<Float>(size_t(at_once) * padded());
    losses_ = arena.take<float>(size_t(at_once));
  }

  // Adds weight · Σ losses of x (r,C) to *loss.
  void forward(const Float* x, const int* targets, float weight, float* loss) {
    for_logits(x, {0, on_.R}, [&](const Float*, Rows rows) { losses(targets + rows.first, rows.count, weight, loss, false); });
  }

  // The same, and dx (r,C) and the gradients of wte.
  virtual void backward(Float* dx, const Float* x, const int* targets, float weight, float* loss) {
    for_logits(x, {0, on_.R}, [&](const Float* some, Rows rows) {
      losses(targets + rows.first, rows.count, weight, loss, true);  // logits_ := dlogits
      const TraceScope scope(-1, has_terms_);
      head_backward(rows.of(dx, on_.C()), unit_.gradient(wte), logits_, some, unit_.weight(wte), rows.count, on_.C(), padded(),
                    unit_.accumulates() || rows.first > 0, on_.stream);
    });
  }

  // Calls use(logits) for each of these rows of x (r,C), of the batch: logits (Vs) of this rank's tokens
  template <class Use>
  void each_row_of_logits(const Float* x, const Rows& rows, Use use) {
    for_logits(x, rows, [&](const Float*, const Rows& now) {
      for (int i = 0; i < now.count; ++i) use(logits_ + size_t(i) * padded());
    });
  }
  // The logits of all tokens from a row of this rank's (Vs). all: memory for them, of all ranks that share the table
  virtual Float* of_all_tokens(Float* /*all*/, Float* own) { return own; }

 protected:
  int padded() const { return on_.list.vocabulary_rows(); }

  // x (R,C), of all ranks that share the table, from this rank's rows (r,C)
  virtual const Float* all_rows(const Float* x) { return x; }
  // Of logits_ (rows,Vs): adds weight · Σ losses to *loss; or, with gradients, dlogits in the place of logits, too.
  virtual void losses(const int* targets, int rows, float weight, float* loss, bool gradients) {
    cross_entropy(logits_, losses_, loss, targets, rows, on_.list.shape().vocabulary, padded(), weight, loss_scale(), gradients,
                  on_.stream);
  }
  const float* loss_scale() const { return &on_.trained->summary()->scale.value; }

  LayerContext<Float>& on_;
  UnitInUse<Float>& unit_;
  Float* logits_ = nullptr;  // (at_once,Vs)
  float* losses_ = nullptr;  // (at_once)
  bool has_terms_ = false;   // is dx of backward a term of a sum over ranks?

 private:
  // Computes the logits of at most at_once_ of these rows of x at a time, and calls use(first of these rows (R,C), rows).
  template <class Use>
  void for_logits(const Float* x, const Rows& rows, Use use) {
    const Float* const all = all_rows(x);
    for (int begin = rows.first, end = rows.first + rows.count; begin < end; begin += at_once_) {
      const Rows now = {begin, std::min(at_once_, end - begin)};
      const Float* const some = now.of(all, on_.C());
      head_forward(logits_, some, unit_.weight(wte), now.count, on_.C(), padded(), on_.stream);  // (rows,Vs)
      use(some, now);
    }
  }

  int at_once_ = 1;
};
