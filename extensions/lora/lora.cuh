// The adapters of a model on a rank (--lora-rank; extensions/lora/lora.h has the maths): their parameters, and the products
// that a linear layer (gpt/layers.cuh) adds to its own. A block that is made of layers does not know of them.
//
// With R rows, and g = s·dy·B (R,rank) of the gradient dy (R,outputs) of a layer's result:
//
//   dx += g·A,   dA = gᵀ·x,   dB = dyᵀ·(s·x·Aᵀ)
//
// Backward computes x·Aᵀ and g where it needs them, so no block keeps them: 2·R·rank·(inputs + outputs) FLOPs more, few
// beside the layer's own. Adapters are small: every rank keeps their weights whole, with ZeRO 3, too.
#pragma once

#include "extensions/lora/lora.h"
#include "gpt/zero.cuh"
#include "kernels/matmul.cuh"

template <class Float>
class Adapters {
 public:
  // A weight of a block, by its number there.
  struct Place {
    int unit, weight;
  };

  // model: the tensors of all of it; block: those of a block
  Adapters(const LoraOptions& lora, const TensorList& model, const std::vector<TensorRow>& block, StoreOptions store,
           DeviceMemory& memory, PinnedMemory& host_memory, Mesh& mesh, cudaStream_t stream)
      : rank_(lora.rank), scale_(float(lora.alpha / lora.rank)), list_(model, adapter_tensors(block, lora)),
        store_(list_, (store.zero = std::min(store.zero, 2), store), memory, host_memory, mesh, stream), stream_(stream) {
    const std::vector<TensorRow> rows = adapter_tensors(block, lora);
    for (const TensorRow& weight : block) {
      const auto number_of = [&](const char* matrix) {
        const auto found = std::ranges::find(rows, module_of(weight.name) + matrix, &TensorRow::name);
        return found == rows.end() ? none : found->number;
      };
      pairs_.push_back({number_of(".lora_A.weight"), number_of(".lora_B.weight")});
    }
  }

  ParameterStore<Float>& store() { return store_; }

  // rows: of the largest micro-batch
  void lay_out(Arena& arena, int rows) { low_ = arena.take<Float>(size_t(rows) * rank_); }

  // Has this weight of a block an adapter?
  bool has(int weight) const { return pairs_[size_t(weight)].a != none; }

  // y (rows,outputs) += s·(x·Aᵀ)·Bᵀ, x (rows,inputs)
  void forward(Float* y, const Float* x, const Place& at, int rows, int inputs, int outputs) {
    compress(x, at, a(at), rows, inputs, true);
    product(y, low_, values(at) + b(at), {.m = rows, .n = outputs, .k = rank_, .transpose_b = true, .accumulate = true});
  }

  // dx (rows,inputs) += g·A, dy (rows,outputs)
  void input_gradient(Float* dx, const Float* dy, const Place& at, int rows, int inputs, int outputs) {
    compress(dy, at, b(at), rows, outputs, false);
    product(dx, low_, values(at) + a(at), {.m = rows, .n = inputs, .k = rank_, .accumulate = true});
  }

  // Writes the gradients of A and B, or adds to them. dy (rows,outputs), x (rows,inputs)
  void weight_gradient(const Float* dy, const Float* x, const Place& at, int rows, int inputs, int outputs) {
    const auto [gradients, adds] = store_.gradients(at.unit);
    compress(x, at, a(at), rows, inputs, true);
    product(gradients + b(at), dy, low_, {.m = outputs, .n = rank_, .k = rows, .transpose_a = true, .accumulate = adds});
    compress(dy, at, b(at), rows, outputs, false);
    product(gradients + a(at), low_, x, {.m = rank_, .n = inputs, .k = rows, .transpose_a = true, .accumulate = adds});
  }

  // W += s·Aᵀ·Bᵀ, of one rank's model: then no layer needs an adapter.
  void merge_into(ParameterStore<Float>& model) {
    const TensorList& list = model.shards().list();
    for (const TensorDescriptor& w : list.tensors()) {
      const Place at = {w.unit, int(&w - list.tensors_of(w.unit))};
      if (!list.is_block(w.unit) || !w.decays() || !has(at.weight)) continue;
      product(const_cast<Float*>(model.acquire(w.unit)) + w.offset, values(at) + a(at), values(at) + b(at),
              {.m = int(w.shape[0]), .n = int(w.shape[1]), .k = rank_, .transpose_a = true, .transpose_b = true,
               .accumulate = true, .alpha = scale_});
    }
  }

 private:
  static constexpr int none = -1;
  // The numbers of A and B in their unit.
  struct Pair {
    int a, b;
  };

  // Where A and B begin in their unit.
  size_t a(const Place& at) const { return list_.tensors_of(at.unit)[pairs_[size_t(at.weight)].a].offset; }
  size_t b(const Place& at) const { return list_.tensors_of(at.unit)[pairs_[size_t(at.weight)].b].offset; }
  const Float* values(const Place& at) { return store_.acquire(at.unit, list_.has(at.unit + 1) ? at.unit + 1 : 0); }

  template <class Out>
  void product(Out* d, const Float* left, const Float* right, const GemmShape& shape) {
    matmul("matmul_adapter", d, left, right, static_cast<const Float*>(nullptr), shape, stream_);
  }
  // low_ (rows,rank) = s · x (rows,columns) · the matrix at this offset, or what that is transposed
  void compress(const Float* x, const Place& at, size_t matrix, int rows, int columns, bool is_transposed) {
    product(low_, x, values(at) + matrix, {.m = rows, .n = rank_, .k = columns, .transpose_b = is_transposed, .alpha = scale_});
  }

  int rank_;
  float scale_;
  TensorList list_;
  ParameterStore<Float> store_;
  cudaStream_t stream_;
  std::vector<Pair> pairs_;  // by the number of the weight in a block
  Float* low_ = nullptr;  // (R,rank)
};
