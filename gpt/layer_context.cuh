// The context that the layers of a rank share (LayerContext), and the parameters of the unit that is computed (UnitInUse).
#pragma once

#include "gpt/zero.cuh"

template <class Float>
class Products;

// What a LayerNorm keeps of each row for its backward: the mean, and rstd = 1/√(var + ε).
struct NormStats {
  float *mean, *rstd;  // (r) each
};

template <class Float>
struct LayerContext {
  ParameterStore<Float>& store;     // of the model's tensors
  ParameterStore<Float>* trained;   // of those that are trained: the same, or others beside them
  const TensorList& list;
  Products<Float>* products;
  cudaStream_t stream;
  float* reductions = nullptr;          // workspace of sums over rows
  bool weight_gradients_follow = true;  // does each layer's weight gradient come right after its input gradient?
  int R = 0, r = 0;                     // rows of the batch under way: all, and this rank's

  int C() const { return list.shape().channels; }
  int c() const { return C() / list.tp(); }

  size_t elements() const { return size_t(r) * size_t(C()); }
  Float* take_rows(Arena& arena) const { return arena.take<Float>(elements()); }  // (r,C)
  NormStats take_norm_stats(Arena& arena) const { return {arena.take<float>(size_t(r)), arena.take<float>(size_t(r))}; }
};

// The parameters of one unit (tensors.h) while it is computed.
template <class Float>
class UnitInUse {
 public:
  static constexpr int none = -1;
  UnitInUse(ParameterStore<Float>& store, const TensorList& list) : store_(store), list_(list) {}

  // The pass comes to this unit, and needs its weights. next: the block that comes next, if any (acquire, zero.cuh).
  void begin(int unit, int next = 0) {
    unit_ = unit;
    weights_ = store_.acquire(unit, next);
  }
  // The same for a pass that needs no weights.
  void use(int unit) {
    unit_ = unit;
    weights_ = nullptr;
  }

  int number() const { return unit_; }
  // Null for a tensor that the unit does not have (none); the gradient also for one that is not trained.
  const Float* weight(int tensor) const { return tensor == none ? nullptr : weights_ + offset(tensor); }
  float* gradient(int tensor) const {
    return tensor == none || !store_.trains() ? nullptr : store_.gradients(unit_).data + offset(tensor);
  }
  // Does this micro-batch add its gradients to the earlier ones of the step?
  bool accumulates() const { return store_.gradients(unit_).accumulate; }
  // All gradients of the micro-batch have been computed. The store sends them to the other ranks, if it is time to.
  void gradients_ready() { store_.gradients_ready(unit_); }

 private:
  ParameterStore<Float>& store_;
  const TensorList& list_;
  size_t offset(int tensor) const { return list_.tensors_of(unit_)[tensor].offset; }

  int unit_ = 0;
  const Float* weights_ = nullptr;
};
