// The adapters of a model on a rank (--lora-rank; extensions/lora/lora.h has the maths): their parameters, and the products
// that they add to those of a layer (gpt/products.cuh). Layers do not know of them.
//
// With R rows, and g = s·dy·B (R,rank) of the gradient dy (R,outputs) of a layer's result:
//
//   dx += g·A,   dA = gᵀ·x,   dB = dyᵀ·(s·x·Aᵀ)
//
// Backward computes x·Aᵀ and g where it needs them, so no block keeps them: 2·R·rank·(inputs + outputs) FLOPs more, few
// beside the layer's own. Adapters are small: every rank keeps their weights whole, with ZeRO 3, too.
#pragma once

#include "extensions/lora/lora.h"
#include "gpt/model_room.cuh"
#include "kernels/matmul.cuh"

template <class Float>
class Adapters final : public WrappedProducts<Float> {
 public:
  using typename Products<Float>::Weights;

  // Around the products of the model's own weights, which are not trained
  explicit Adapters(ModelParts<Float>& parts)
      : WrappedProducts<Float>(parts.context, *parts.context.products), rank_(parts.options.lora.rank),
        scale_(float(parts.options.lora.alpha / rank_)), list_(parts.context.list, adapter_tensors(parts.block, parts.options.lora)),
        store_(list_, store_options(parts.options.store), parts.memory, parts.host_memory, parts.mesh, parts.context.stream) {
    const std::vector<TensorRow> rows = adapter_tensors(parts.block, parts.options.lora);
    for (const TensorRow& weight : parts.block) {
      const auto number_of = [&](const char* matrix) {
        const auto found = std::ranges::find(rows, module_of(weight.name) + matrix, &TensorRow::name);
        return found == rows.end() ? none : found->number;
      };
      pairs_.push_back({number_of(".lora_A.weight"), number_of(".lora_B.weight")});
    }
  }

  ParameterStore<Float>& store() { return store_; }

  void lay_out(Arena& arena) { low_ = arena.take<Float>(size_t(on_.R) * rank_); }

  // Layers that have no adapter are not trained.
  bool trains(const Weights& of) const override { return changes(of); }

  // out (rows,outputs) += s·(x·Aᵀ)·Bᵀ
  void forward(Float* out, const Float* x, const Weights& of, const Float* bias, int rows) override {
    inner_.forward(out, x, of, bias, rows);
    if (!changes(of)) return;
    const Place at = place(of);
    compress(x, at, a(at), rows, of.inputs, true);
    product(out, low_, values(at) + b(at), {.m = rows, .n = of.outputs, .k = rank_, .transpose_b = true, .accumulate = true});
  }

  // dx (rows,inputs) += g·A
  void input_gradient(Float* dx, const Float* dout, const Weights& of, int rows) override {
    inner_.input_gradient(dx, dout, of, rows);
    if (!changes(of)) return;
    const Place at = place(of);
    compress(dout, at, b(at), rows, of.outputs, false);
    product(dx, low_, values(at) + a(at), {.m = rows, .n = of.inputs, .k = rank_, .accumulate = true});
  }

  // The gradients of A and B in the place of W's.
  void weight_gradient(const Float* dout, const Float* x, const Weights& of, int rows, bool) override {
    if (!changes(of)) return;
    const Place at = place(of);
    const auto [gradients, adds] = store_.gradients(at.unit);
    compress(x, at, a(at), rows, of.inputs, true);
    product(gradients + b(at), dout, low_, {.m = of.outputs, .n = rank_, .k = rows, .transpose_a = true, .accumulate = adds});
    compress(dout, at, b(at), rows, of.outputs, false);
    product(gradients + a(at), low_, x, {.m = rank_, .n = of.inputs, .k = rows, .transpose_a = true, .accumulate = adds});
  }

  // W += s·Aᵀ·Bᵀ, of one rank's model: then no layer needs an adapter.
  void merge_into(ParameterStore<Float>& model) {
    const TensorList& list = model.shards().list();
    for (const TensorDescriptor& w : list.tensors()) {
      const Place at = {w.unit, int(&w - list.tensors_of(w.unit))};
      if (!list.is_block(w.unit) || !w.decays() || !has_adapter(at.weight)) continue;
      product(const_cast<Float*>(model.acquire(w.unit)) + w.offset, values(at) + a(at), values(at) + b(at),
              {.m = int(w.shape[0]), .n = int(w.shape[1]), .k = rank_, .transpose_a = true, .transpose_b = true,
               .accumulate = true, .alpha = scale_});
    }
  }

 private:
  using Products<Float>::on_;
  using WrappedProducts<Float>::inner_;
  static constexpr int none = -1;
  // A weight of a block, by its number there.
  struct Place {
    int unit, weight;
  };
  // The numbers of A and B in their unit.
  struct Pair {
    int a, b;
  };

  static StoreOptions store_options(StoreOptions model) {
    model.zero = std::min(model.zero, 2);
    return model;
  }
  bool has_adapter(int weight) const { return pairs_[size_t(weight)].a != none; }
  bool changes(const Weights& of) const override { return has_adapter(of.weight); }
  Place place(const Weights& of) const { return {of.unit.number(), of.weight}; }
  // Where A and B begin in their unit.
  size_t a(const Place& at) const { return list_.tensors_of(at.unit)[pairs_[size_t(at.weight)].a].offset; }
  size_t b(const Place& at) const { return list_.tensors_of(at.unit)[pairs_[size_t(at.weight)].b].offset; }
  const Float* values(const Place& at) { return store_.acquire(at.unit, list_.has(at.unit + 1) ? at.unit + 1 : 0); }

  template <class Out>
  void product(Out* d, const Float* left, const Float* right, const GemmShape& shape) {
    matmul("matmul_adapter", d, left, right, shape, on_.stream);
  }
  // low_ (rows,rank) = s · x (rows,columns) · the matrix at this offset, or its transpose
  void compress(const Float* x, const Place& at, size_t matrix, int rows, int columns, bool is_transposed) {
    product(low_, x, values(at) + matrix, {.m = rows, .n = rank_, .k = columns, .transpose_b = is_transposed, .alpha = scale_});
  }

  int rank_;
  float scale_;
  TensorList list_;
  ParameterStore<Float> store_;
  std::vector<Pair> pairs_;  // by the number of the weight in a block
  Float* low_ = nullptr;  // (R,rank)
};
