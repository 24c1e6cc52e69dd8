// The two ends of the model, which share the table wte (V,C): the embedding, and the head with the loss. Ranks of
// tensor parallelism have Vs rows of the table each: V/N rounded up to a multiple of 128 (TensorList::vocabulary_rows).
#pragma once

#include "extensions/tensor_parallel/kernels/vocabulary_cross_entropy.cuh"
#include "gpt/layers.cuh"
#include "gpt/tokens.h"
#include "kernels/cross_entropy.cuh"
#include "kernels/embedding.cuh"

template <class Float>
class Embedding {
 public:
  Embedding(LayerContext<Float>& context, UnitInUse<Float>& unit) : on_(context), unit_(unit) {}

  // out (r,C) = wte[token] + wpe[position]
  void forward(Float* out, const Tokens& tokens, const Positions& positions) {
    const Float* const positions_table = on_.tp.rank() == 0 ? unit_.weight(wpe) : nullptr;  // only one rank adds it to the sum
    on_.tp.then_scatter(out, on_.R, on_.C(), [&](Float* terms, Rows rows) {
      embedding_forward(rows.of(terms, on_.C()), tokens.inputs + rows.first, unit_.weight(wte), positions_table, on_.list.vocabulary(),
                        positions, rows.first, rows.count, on_.C(), on_.stream);
    });
  }

  // Gradients of both tables from dout (r,C). wte's gradient already holds the head's part (zeros on a stage without
  // the head), so this only ever adds to it.
  void backward(const Float* dout, const Tokens& tokens, const Positions& positions, int samples) {
    const Float* all = on_.tp.gather(on_.tp.exchange(), dout, on_.R, on_.C());  // (R,C)
    embedding_backward(unit_.gradient(wte), unit_.gradient(wpe), tokens.inputs, tokens.order, all, on_.list.vocabulary(), samples,
                       positions, on_.list.shape().positions, on_.C(), unit_.accumulates(), on_.reductions, on_.stream);
  }

 private:
  LayerContext<Float>& on_;
  UnitInUse<Float>& unit_;
};

// logits = x·wteᵀ, and the loss. It works on some rows at a time, so that the logits (R,Vs) never lie in memory all at
// once.
template <class Float>
class Head {
 public:
  Head(LayerContext<Float>& context, UnitInUse<Float>& unit) : on_(context), unit_(unit) {}

  // at_once: rows of logits that memory is laid out for
  void lay_out_logits(Arena& arena, int at_once) {
    at_once_ = at_once;
    logits_ = arena.take<Float>(size_t(at_once) * padded());
    losses_ = arena.take<float>(size_t(at_once));
  }
  // Where ranks share the table. rows (R,C): memory that nobody needs during the head's passes
  void lay_out_shared(Arena& arena, Float* rows, int at_once) {
    rows_ = rows;
    statistics_ = arena.take<RowStatistics>(size_t(on_.tp.size()) * at_once);
  }

  // Adds weight · Σ losses of x (r,C) to *loss.
  void forward(const Float* x, const int* targets, float weight, float* loss) {
    for_rows(gather(x), {0, on_.R}, [&](const Float* some, Rows rows) { losses(some, targets, rows, weight, loss, false); });
  }

  // The same, and dx (r,C) and the gradients of wte.
  void backward(Float* dx, const Float* x, const int* targets, float weight, float* loss) {
    Float* const dall = on_.tp.size() == 1 ? dx : on_.tp.exchange();  // (R,C)
    for_rows(gather(x), {0, on_.R}, [&](const Float* some, Rows rows) {
      losses(some, targets, rows, weight, loss, true);  // logits_ := dlogits
      const TraceScope scope(-1, on_.tp.size() > 1);    // dall is a term of a sum
      head_backward(rows.of(dall, on_.C()), unit_.gradient(wte), logits_, some, unit_.weight(wte), rows.count, on_.C(), padded(),
                    unit_.accumulates() || rows.first > 0, on_.stream);
    });
    on_.tp.then_scatter(dx, on_.R, on_.C(), [](Float*, Rows) {});
  }

  // x (R,C) of all ranks
  const Float* gather(const Float* x) { return on_.tp.gather(rows_, x, on_.R, on_.C()); }

  // Calls use(logits) for each of these rows: (Vs) of this rank's tokens. all: gather(x)
  template <class Use>
  void each_row_of_logits(const Float* all, const Rows& rows, Use use) {
    for_rows(all, rows, [&](const Float* some, const Rows& now) {
      product(some, now.count);
      for (int i = 0; i < now.count; ++i) use(logits_ + size_t(i) * padded());
    });
  }

 private:
  int padded() const { return on_.list.vocabulary_rows(); }

  // Calls use(x, rows) for at most at_once_ of these rows at a time; x: the first of them in `all`.
  template <class Use>
  void for_rows(const Float* all, const Rows& rows, Use use) {
    for (int begin = rows.first, end = rows.first + rows.count; begin < end; begin += at_once_) {
      const Rows some = {begin, std::min(at_once_, end - begin)};
      use(some.of(all, on_.C()), some);
    }
  }

  void product(const Float* x, int rows) {
    head_forward(logits_, x, unit_.weight(wte), rows, on_.C(), padded(), on_.stream);  // (rows,Vs)
  }

  // From x (rows,C): logits and their losses; or, with gradients, dlogits in the place of logits.
  void losses(const Float* x, const int* all_targets, const Rows& rows, float weight, float* loss, bool gradients) {
    product(x, rows.count);
    const float* loss_scale = &on_.trained().summary()->scale.value;
    const int* targets = all_targets + rows.first;
    if (on_.tp.size() == 1)
      return cross_entropy(logits_, losses_, loss, targets, rows.count, on_.list.shape().vocabulary, padded(), weight, loss_scale,
                           gradients, on_.stream);
    RowStatistics* const own = statistics_ + size_t(on_.tp.rank()) * rows.count;
    vocabulary_statistics(own, logits_, targets, rows.count, on_.list.vocabulary(), padded(), on_.stream);
    on_.tp.gather_values(&statistics_->exponentials.exponent, &own->exponentials.exponent, 3 * size_t(rows.count));
    if (on_.tp.rank() > 0) loss = nullptr;  // of the sum over all ranks one rank's is enough
    vocabulary_cross_entropy(logits_, losses_, loss, statistics_, on_.tp.size(), targets, rows.count, on_.list.vocabulary(),
                             padded(), weight, loss_scale, gradients, on_.stream);
  }

  LayerContext<Float>& on_;
  UnitInUse<Float>& unit_;
  int at_once_ = 1;
  Float* logits_ = nullptr;              // (at_once,Vs)
  float* losses_ = nullptr;              // (at_once)
  Float* rows_ = nullptr;                // (R,C): x of all ranks
  RowStatistics* statistics_ = nullptr;  // (N,at_once)
};
