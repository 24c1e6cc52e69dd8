// The embedding and the head of ranks that share the table wte (V,C): each has Vs rows of it, V/N rounded up to a multiple of
// 128. An embedding is a sum of which one rank has a term that is not zero. The loss of a row needs three numbers of each rank
// (kernels/vocabulary_cross_entropy.cuh); the logits stay where they are.
#pragma once

#include "extensions/tensor_parallel/kernels/vocabulary_cross_entropy.cuh"
#include "extensions/tensor_parallel/tensor_parallel.cuh"
#include "gpt/ends.cuh"

template <class Float>
class TensorParallelEmbedding final : public Embedding<Float> {
 public:
  TensorParallelEmbedding(LayerContext<Float>& context, UnitInUse<Float>& unit, TensorParallel<Float>& tp)
      : Embedding<Float>(context, unit), tp_(tp) {}

  void forward(Float* out, const Tokens& tokens, const Positions& positions) override {
    const Float* const positions_table = tp_.rank() == 0 ? unit_.weight(wpe) : nullptr;  // only one rank adds it to the sum
    tp_.then_scatter(out, on_.R, on_.C(), [&](Float* terms, Rows rows) {
      this->add_up(rows.of(terms, on_.C()), tokens, positions_table, positions, rows);
    });
  }
  void backward(const Float* dout, const Tokens& tokens, const Positions& positions, int samples) override {
    Embedding<Float>::backward(tp_.gather(tp_.exchange(), dout, on_.R, on_.C()), tokens, positions, samples);
  }

 private:
  using Embedding<Float>::on_, Embedding<Float>::unit_;
  TensorParallel<Float>& tp_;
};

template <class Float>
class TensorParallelHead final : public Head<Float> {
 public:
  TensorParallelHead(LayerContext<Float>& context, UnitInUse<Float>& unit, TensorParallel<Float>& tp)
      : Head<Float>(context, unit), tp_(tp) {
    this->has_terms_ = true;
  }

  // rows (R,C): memory that nobody needs during the head's passes; at_once: rows of logits
  void lay_out(Arena& arena, Float* rows, int at_once) {
    rows_ = rows;
    statistics_ = arena.take<RowStatistics>(size_t(tp_.size()) * at_once);
  }

  void backward(Float* dx, const Float* x, const int* targets, float weight, float* loss) override {
    Head<Float>::backward(tp_.exchange(), x, targets, weight, loss);
    tp_.then_scatter(dx, on_.R, on_.C(), [](Float*, Rows) {});
  }
  Float* of_all_tokens(Float* all, Float* own) override { return tp_.gather_values(all, own, size_t(this->padded())); }

 protected:
  const Float* all_rows(const Float* x) override { return tp_.gather(rows_, x, on_.R, on_.C()); }
  void losses(const int* targets, int rows, float weight, float* loss, bool gradients) override {
    RowStatistics* const own = statistics_ + size_t(tp_.rank()) * rows;
    vocabulary_statistics(own, this->logits_, targets, rows, on_.list.vocabulary(), this->padded(), on_.stream);
    tp_.gather_values(&statistics_->exponentials.exponent, &own->exponentials.exponent, 3 * size_t(rows));
    if (tp_.rank() > 0) loss = nullptr;  // of the sum over all ranks one rank's is enough
    vocabulary_cross_entropy(this->logits_, this->losses_, loss, statistics_, tp_.size(), targets, rows, on_.list.vocabulary(),
                             this->padded(), weight, this->loss_scale(), gradients, on_.stream);
  }

 private:
  using Head<Float>::on_;
  TensorParallel<Float>& tp_;
  Float* rows_ = nullptr;                // (R,C): x of all ranks
  RowStatistics* statistics_ = nullptr;  // (N,at_once)
};
