// The adapters of a model on a rank (--lora-rank; parallel/lora.h has the maths): their parameters, and the products
// that a linear layer (parallel/layers.cuh) adds to its own. A block that is made of layers does not know of them.
//
// With R rows, and g = s·dy·B (R,rank) of the gradient dy (R,outputs) of a layer's result:
//
//   dx += g·A,   dA = gᵀ·x,   dB = dyᵀ·(s·x·Aᵀ)
//
// Backward computes x·Aᵀ and g again where it needs them: 2·R·rank·(inputs + outputs) FLOPs, which are few beside the
// layer's own, and no block has to keep them.
#pragma once

#include "kernels/matmul.cuh"
#include "kernels/scale.cuh"
#include "parallel/lora.h"
#include "parallel/zero.cuh"

template <class Float>
class Adapters {
 public:
  // base: the tensors of the whole model; block: those of a block, by whose numbers layers ask for adapters
  Adapters(const LoraOptions& options, const TensorList& base, const std::vector<TensorRow>& block,
           const StoreOptions& store, DeviceMemory& memory, PinnedMemory& host_memory, Mesh& mesh, cudaStream_t stream)
      : options_(options), list_(base, adapter_tensors(block, options)), store_(list_, store, memory, host_memory, mesh, stream), stream_(stream) {
    const std::vector<TensorRow> rows = adapter_tensors(block, options);
    for (const TensorRow& weight : block) {
      const auto number = [&](const char* matrix) {
        const auto found = std::ranges::find(rows, module_of(weight.name) + matrix, &TensorRow::name);
        return found == rows.end() || weight.shape.size() != 2 ? none : found->number;
      };
      pairs_.push_back({number(".lora_A.weight"), number(".lora_B.weight")});
    }
  }

  ParameterStore<Float>& store() { return store_; }
  size_t parameters() const { return list_.parameters(); }

  // rows: of the largest micro-batch
  void lay_out(Arena& arena, int rows) { low_ = arena.take<Float>(size_t(rows) * options_.rank); }

  // The pass comes to a block (UnitInUse::begin).
  void begin(int unit, int next = 0) {
    unit_ = unit;
    weights_ = store_.acquire(unit, next);
  }

  // Has this weight of a block an adapter?
  bool has(int weight) const { return pairs_[size_t(weight)].a != none; }

  // y (rows,outputs) += s·(x·Aᵀ)·Bᵀ, x (rows,inputs)
  void add_forward(Float* y, const Float* x, int weight, int rows, int inputs, int outputs) {
    compress(x, weight, rows, inputs);
    product(y, low_, at(pairs_[weight].b), {.m = rows, .n = outputs, .k = options_.rank, .transpose_b = true, .accumulate = true});
  }

  // dx (rows,inputs) += g·A, dy (rows,outputs)
  void add_input_gradient(Float* dx, const Float* dy, int weight, int rows, int inputs, int outputs) {
    compress_gradient(dy, weight, rows, outputs);
    product(dx, low_, at(pairs_[weight].a), {.m = rows, .n = inputs, .k = options_.rank, .accumulate = true});
  }

  // Writes the gradients of A and B, or adds to them. dy (rows,outputs), x (rows,inputs)
  void weight_gradient(const Float* dy, const Float* x, int weight, int rows, int inputs, int outputs) {
    const auto [gradients, adds] = store_.gradients(unit_);
    const auto [a, b] = pairs_[size_t(weight)];
    compress(x, weight, rows, inputs);
    product(gradients + offset(b), dy, low_, {.m = outputs, .n = options_.rank, .k = rows, .transpose_a = true, .accumulate = adds});
    compress_gradient(dy, weight, rows, outputs);
    product(gradients + offset(a), low_, x, {.m = options_.rank, .n = inputs, .k = rows, .transpose_a = true, .accumulate = adds});
  }

 private:
  static constexpr int none = -1;
  struct Pair {
    int a, b;  // numbers of the tensors in the adapters' unit
  };

  size_t offset(int tensor) const { return list_.tensors_of(unit_)[tensor].offset; }
  const Float* at(int tensor) const { return weights_ + offset(tensor); }

  template <class Out>
  void product(Out* d, const Float* a, const Float* b, const GemmShape& shape) {
    const Float* no_bias = nullptr;
    matmul("matmul_adapter", d, a, b, no_bias, shape, stream_);
  }
  // low_ (rows,rank) = s·x·Aᵀ
  void compress(const Float* x, int weight, int rows, int inputs) {
    product(low_, x, at(pairs_[weight].a), {.m = rows, .n = options_.rank, .k = inputs, .transpose_b = true});
    scale(low_, options_.scale(), rows, options_.rank, stream_);
  }
  // low_ (rows,rank) = g
  void compress_gradient(const Float* dy, int weight, int rows, int outputs) {
    product(low_, dy, at(pairs_[weight].b), {.m = rows, .n = options_.rank, .k = outputs});
    scale(low_, options_.scale(), rows, options_.rank, stream_);
  }

  LoraOptions options_;
  TensorList list_;
  ParameterStore<Float> store_;
  cudaStream_t stream_;
  std::vector<Pair> pairs_;  // by the number of the weight in a block
  int unit_ = 0;
  const Float* weights_ = nullptr;
  Float* low_ = nullptr;  // (R,rank)
};
