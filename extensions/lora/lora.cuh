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
        return found == rows.end() ? unit_.none : found->number;
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
    const auto [a, b] = begin_unit(of);
    compress(x, unit_.weight(a), rows, of.inputs, true);
    product(out, low_, unit_.weight(b), {.m = rows, .n = of.outputs, .k = rank_, .transpose_b = true, .accumulate = true});
  }

  // dx (rows,inputs) += g·A
  void input_gradient(Float* dx, const Float* dout, const Weights& of, int rows) override {
    inner_.input_gradient(dx, dout, of, rows);
    if (!changes(of)) return;
    const auto [a, b] = begin_unit(of);
    compress(dout, unit_.weight(b), rows, of.outputs, false);
    product(dx, low_, unit_.weight(a), {.m = rows, .n = of.inputs, .k = rank_, .accumulate = true});
  }

  // The gradients of A and B in the place of W's.
  void weight_gradient(const Float* dout, const Float* x, const Weights& of, int rows, bool) override {
    if (!changes(of)) return;
    const auto [a, b] = begin_unit(of);
    const bool adds = unit_.accumulates();
    compress(x, unit_.weight(a), rows, of.inputs, true);
    product(unit_.gradient(b), dout, low_, {.m = of.outputs, .n = rank_, .k = rows, .transpose_a = true, .accumulate = adds});
    compress(dout, unit_.weight(b), rows, of.outputs, false);
    product(unit_.gradient(a), low_, x, {.m = rank_, .n = of.inputs, .k = rows, .transpose_a = true, .accumulate = adds});
  }

  // W += s·Aᵀ·Bᵀ, of one rank's model: then no layer needs an adapter.
  void merge_into(ParameterStore<Float>& model) {
    const TensorList& list = model.shards().list();
    for (const TensorDescriptor& w : list.tensors()) {
      const int weight = int(&w - list.tensors_of(w.unit));
      if (!list.is_block(w.unit) || !w.decays() || !has_adapter(weight)) continue;
      const auto [a, b] = pairs_[size_t(weight)];
      unit_.begin(w.unit);
      product(const_cast<Float*>(model.acquire(w.unit)) + w.offset, unit_.weight(a), unit_.weight(b),
              {.m = int(w.shape[0]), .n = int(w.shape[1]), .k = rank_, .transpose_a = true, .transpose_b = true,
               .accumulate = true, .alpha = scale_});
    }
  }

 private:
  using Products<Float>::on_;
  using WrappedProducts<Float>::inner_;
  // The numbers of A and B in their unit.
  struct Pair {
    int a, b;
  };

  static StoreOptions store_options(StoreOptions model) {
    model.zero = std::min(model.zero, 2);
    return model;
  }
  bool has_adapter(int weight) const { return pairs_[size_t(weight)].a != unit_.none; }
  bool changes(const Weights& of) const override { return has_adapter(of.weight); }
  // Begins the unit of the adapter beside this weight, and returns the numbers of its A and B there.
  Pair begin_unit(const Weights& of) {
    const int unit = of.unit.number();
    unit_.begin(unit, list_.has(unit + 1) ? unit + 1 : 0);
    return pairs_[size_t(of.weight)];
  }

  template <class Out>
  void product(Out* d, const Float* left, const Float* right, const GemmShape& shape) {
    matmul("matmul_adapter", d, left, right, shape, on_.stream);
  }
  // low_ (rows,rank) = s · x (rows,columns) · matrix, or its transpose
  void compress(const Float* x, const Float* matrix, int rows, int columns, bool is_transposed) {
    product(low_, x, matrix, {.m = rows, .n = rank_, .k = columns, .transpose_b = is_transposed, .alpha = scale_});
  }

  int rank_;
  float scale_;
  TensorList list_;
  ParameterStore<Float> store_;
  UnitInUse<Float> unit_{store_, list_};  // the adapters of the block that is computed
  std::vector<Pair> pairs_;  // by the number of the weight in a block
  Float* low_ = nullptr;  // (R,rank)
};
