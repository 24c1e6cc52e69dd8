// The products of layers that tensor-parallel ranks share (tensor_parallel.cuh), around those of one rank:
//
//   column layer   all_gather of the rows (R/N,C) → (R,C), product with own columns of W
//   row layer      product with own rows of W, reduce_scatter of the sums (R,C) → (R/N,C)
//
// In backward the two change places. The rows of a product are cut into pieces, so that sending hides behind the products.
// A weight gradient needs all rows: those of dout that a row layer has just gathered, and those of a column layer's x, which
// are gathered behind the product before.
#pragma once

#include <map>

#include "extensions/tensor_parallel/tensor_parallel.cuh"
#include "gpt/products.cuh"

template <class Float>
class TensorParallelProducts final : public WrappedProducts<Float> {
 public:
  using typename Products<Float>::Weights;
  // is_recomputed: forward runs once more before backward, whose rows can be used again.
  TensorParallelProducts(LayerContext<Float>& context, Products<Float>& inner, TensorParallel<Float>& tp, bool is_recomputed)
      : WrappedProducts<Float>(context, inner), tp_(tp), is_recomputed_(is_recomputed) {}

  // For the rows of each column layer of a block, whose tensors are split by columns (tensors.h).
  void lay_out(Arena& arena) {
    const int block = on_.list.chunks()[0].first + 1;
    for (const TensorDescriptor& tensor : on_.list.tensors())
      if (tensor.unit == block && tensor.shape.size() == 2 && tensor.split.axis == 1)
        rows_[int(&tensor - on_.list.tensors_of(block))] = arena.take<Float>(size_t(on_.R) * on_.C());
  }
  // Some of this memory (R,C), which is free between blocks.
  Float* rows_between_blocks() const { return rows_.begin()->second; }

  void forward(Float* out, const Float* x, const Weights& of, const Float* bias, int rows) override {
    if (of.is_column)
      tp_.gather_then(rows_.at(of.weight), x, rows, of.inputs, [&](const Float* all, Rows piece) {
        inner_.forward(piece.of(out, of.outputs), piece.of(all, of.inputs), of, bias, piece.count);
      });
    else
      tp_.then_scatter(out, rows, of.outputs, [&](Float* terms, Rows piece) {
        inner_.forward(piece.of(terms, of.outputs), piece.of(x, of.inputs), of, tp_.once(bias), piece.count);
      });
  }
  // (gelu follows column layers alone, whose columns are whole sums on their rank.)
  void forward_gelu(Float* out, Float* before, const Float* x, const Weights& of, int rows) override {
    tp_.gather_then(rows_.at(of.weight), x, rows, of.inputs, [&](const Float* all, Rows piece) {
      inner_.forward_gelu(piece.of(out, of.outputs), piece.of(before, of.outputs), piece.of(all, of.inputs), of, piece.count);
    });
  }

  void input_gradient(Float* dx, const Float* dout, const Weights& of, int rows) override {
    if (of.is_column)
      tp_.start_scatter(dx, rows, of.inputs, [&](Float* terms, Rows piece) {
        inner_.input_gradient(piece.of(terms, of.inputs), piece.of(dout, of.outputs), of, piece.count);
      });
    else
      dout_ = tp_.gather_then(tp_.exchange(), dout, rows, of.outputs, [&](const Float* all, Rows piece) {
        inner_.input_gradient(piece.of(dx, of.inputs), piece.of(all, of.outputs), of, piece.count);
      });
  }
  void finish_input_gradient() override { tp_.finish_scatter(); }
  void input_gradient_gelu(Float* dbefore, const Float* dout, const Float* before, const Weights& of, int rows) override {
    dout_ = tp_.gather_then(tp_.exchange(), dout, rows, of.outputs, [&](const Float* all, Rows piece) {
      inner_.input_gradient_gelu(piece.of(dbefore, of.inputs), piece.of(all, of.outputs), piece.of(before, of.inputs), of, piece.count);
    });
  }

  void start_weight_gradient(const Float* x, const Weights& of) override {
    if (inner_.trains(of) && !is_recomputed_) tp_.start_gather(rows_.at(of.weight), x, on_.R, of.inputs);
  }
  void weight_gradient(const Float* dout, const Float* x, const Weights& of, int rows, bool follows) override {
    if (!inner_.trains(of)) return;
    if (of.is_column) {
      if (!follows) tp_.gather(rows_.at(of.weight), x, rows, of.inputs);
      return inner_.weight_gradient(dout, rows_.at(of.weight), of, rows, follows);
    }
    if (!follows) dout_ = tp_.gather(tp_.exchange(), dout, rows, of.outputs);
    inner_.weight_gradient(dout_, x, of, rows, follows);
  }

 private:
  using Products<Float>::on_;
  using WrappedProducts<Float>::inner_;

  TensorParallel<Float>& tp_;
  bool is_recomputed_;
  std::map<int, Float*> rows_;    // (R,C) each: x of all ranks, by the column layer's weight
  const Float* dout_ = nullptr;   // (R,C): of all ranks, until the next layer exchanges rows
};
