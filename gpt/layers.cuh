// The layers between which the residual stream runs, and how ranks share them. A block that is made of these layers
// says what is computed, and nothing of who computes it.
//
//   LayerNorm      own rows (r,C), with the addition before it
//   ColumnLinear   from own rows (r,C) to own columns (R,c) of the result: all_gather of the rows, product
//   RowLinear      from own columns (R,c) to own rows (r,C) of the result: product, reduce_scatter of the sums
//
// R rows of a batch, C channels; N tensor-parallel ranks (tensor_parallel.cuh) have r = R/N rows and c = C/N columns
// each. With one rank r = R, c = C, and nothing is copied or sent.
#pragma once

#include "extensions/lora/lora.cuh"
#include "extensions/tensor_parallel/tensor_parallel.cuh"
#include "gpt/zero.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/linear.cuh"

// What a LayerNorm keeps of each row for its backward.
struct Moments {
  float *mean, *rstd;  // (r) each
};

// What the layers of a rank share, and work on.
template <class Float>
struct LayerContext {
  ParameterStore<Float>& store;
  const TensorList& list;
  TensorParallel<Float>& tp;
  cudaStream_t stream;
  Fp8Products<Float> fp8;
  Adapters<Float>* adapters = nullptr;  // of --lora-rank: then `store` has the model, which is not trained
  float* reductions = nullptr;  // workspace of sums over rows
  int R = 0, r = 0;             // rows of the batch under way: all, and this rank's

  // The store of what is trained
  ParameterStore<Float>& trained() const { return adapters ? adapters->store() : store; }
  int C() const { return list.shape().channels; }
  int c() const { return C() / tp.size(); }

  size_t elements() const { return size_t(r) * size_t(C()); }
  // For a launch that writes own rows (r,C), which a product in eight bits may take next. Of rows that are gathered
  // first, the maximum is not known.
  float* maximum_of(const Float* rows) { return tp.size() == 1 ? fp8.maximum_of(rows, elements()) : nullptr; }
  Float* take_rows(Arena& arena) const { return arena.take<Float>(elements()); }  // (r,C)
  Moments take_moments(Arena& arena) const { return {arena.take<float>(size_t(r)), arena.take<float>(size_t(r))}; }
};

// The parameters of one unit (tensors.h) while it is computed.
template <class Float>
class UnitInUse {
 public:
  static constexpr int none = -1;
  UnitInUse(ParameterStore<Float>& store, const TensorList& list) : store_(store), list_(list) {}

  // The pass comes to this unit, and needs its weights. next: the block that comes next, if any (acquire, zero.cuh).
  void begin(int unit, int next = 0) {
    use(unit);
    weights_ = store_.acquire(unit, next);
  }
  // The same for a pass that needs no weights.
  void use(int unit) { unit_ = unit; }

  int number() const { return unit_; }
  // Null for a tensor that the unit does not have (none); the gradient also for one that is not trained.
  const Float* weight(int tensor) const { return tensor == none ? nullptr : weights_ + offset(tensor); }
  float* gradient(int tensor) const {
    return tensor == none || !store_.trains() ? nullptr : store_.gradients(unit_).data + offset(tensor);
  }
  // The matrices of blocks that multiply in eight bits (extensions/fp8/fp8.cuh)
  bool is_fp8() const { return store_.fp8().has(unit_); }
  Fp8Matrix fp8(int tensor, bool transposed) const { return store_.fp8().matrix(unit_, tensor, transposed); }
  // Does this micro-batch add its gradients to the earlier ones of the step?
  bool accumulates() const { return store_.gradients(unit_).accumulate; }
  // All gradients of the micro-batch have been computed.
  void gradients_ready() { store_.gradients_ready(unit_); }

 private:
  ParameterStore<Float>& store_;
  const TensorList& list_;
  size_t offset(int tensor) const { return list_.tensors_of(unit_)[tensor].offset; }

  int unit_ = 0;
  const Float* weights_ = nullptr;
};

// The residual stream, as the sum of two tensors.
template <class Float>
struct Residual {
  const Float* stream;            // (r,C)
  const Float* branch = nullptr;  // (r,C)  output of the last attention or MLP, to be added to `stream`; null: nothing to add
};

template <class Float>
class LayerNorm {
 public:
  // weight, bias: numbers of the unit's tensors
  LayerNorm(LayerContext<Float>& context, UnitInUse<Float>& unit, int weight, int bias)
      : on_(context), unit_(unit), weight_(weight), bias_(bias) {}

  // out (r,C) = layernorm(sum), sum (r,C) = x.stream + x.branch. Without a branch x.stream is `sum`
  // already, and nothing is written to it.
  void forward(Float* out, Float* sum, const Moments& moments, const Residual<Float>& x) const {
    residual_layernorm_forward(out, sum, moments.mean, moments.rstd, x.stream, x.branch, unit_.weight(weight_),
                               unit_.weight(bias_), on_.r, on_.C(), on_.stream, on_.maximum_of(out));
  }

  // dsum (r,C) += the gradient through the norm, from dout (r,C). Writes the gradients of weight and bias, or adds to
  // them, if they are trained.
  void backward(Float* dsum, const Float* dout, const Float* sum, const Moments& moments) const {
    layernorm_backward(dsum, unit_.gradient(weight_), unit_.gradient(bias_), dout, sum, unit_.weight(weight_), moments.mean,
                       moments.rstd, on_.r, on_.C(), unit_.accumulates(), on_.reductions, on_.stream, on_.maximum_of(dsum));
  }

 private:
  LayerContext<Float>& on_;
  UnitInUse<Float>& unit_;
  int weight_, bias_;
};

// y = x·weight + bias; (inputs,outputs) is what this rank has of the weight. bias: UnitInUse::none if there is none.
template <class Float>
class Linear {
 public:
  Linear(LayerContext<Float>& context, UnitInUse<Float>& unit, int weight, int bias, int inputs, int outputs)
      : on_(context), unit_(unit), weight_(weight), bias_(bias), inputs_(inputs), outputs_(outputs) {}
  virtual ~Linear() = default;

  // The gradients of weight and bias, from dout and x as the layer's own functions take them. is_gathered: what these
  // functions have gathered of them is still there.
  virtual void weight_gradient(const Float* dout, const Float* x, bool is_gathered) = 0;

 protected:
  // With adapters (extensions/lora/lora.h) nothing else is trained, and only some weights have one.
  typename Adapters<Float>::Place at() const { return {unit_.number(), weight_}; }
  bool is_adapted() const { return on_.adapters && on_.adapters->has(weight_); }
  bool is_trained() const { return !on_.adapters || is_adapted(); }
  // Do the library's own ways to compute gelu, too, give what the layer computes?
  bool is_plain() const { return !unit_.is_fp8() && !is_adapted(); }

  // out (rows,outputs) = x (rows,inputs) · weight + bias
  void multiply(Float* out, const Float* x, const Float* bias, int rows) {
    multiply_base(out, x, bias, rows);
    if (is_adapted()) on_.adapters->forward(out, x, at(), rows, inputs_, outputs_);
  }
  // The products with the weight itself, in 8 bits if the unit is.
  void multiply_base(Float* out, const Float* x, const Float* bias, int rows) {
    if constexpr (can_multiply_fp8<Float>)
      if (unit_.is_fp8()) return on_.fp8.forward(out, x, unit_.fp8(weight_, true), bias, rows, inputs_, outputs_);
    linear_forward(out, x, unit_.weight(weight_), bias, rows, inputs_, outputs_, on_.stream);
  }
  // out = gelu(before), before = x·weight + bias
  void multiply_gelu(Float* out, Float* before, const Float* x, const Float* bias, int rows) {
    if (is_plain())
      return linear_gelu_forward(out, before, x, unit_.weight(weight_), bias, rows, inputs_, outputs_, on_.stream);
    multiply(before, x, bias, rows);
    gelu(out, before, rows);
  }
  void gelu(Float* out, const Float* before, int rows) {
    gelu_forward(out, before, rows, outputs_, on_.stream, on_.fp8.maximum_of(out, size_t(rows) * outputs_));
  }
  // dx (rows,inputs) = dout (rows,outputs) · weightᵀ. In eight bits dout is transposed at the same time for
  // add_weight_gradient(), which needs one scale for all rows.
  void multiply_back(Float* dx, const Float* dout, int rows) {
    multiply_base_back(dx, dout, rows);
    if (is_adapted()) on_.adapters->input_gradient(dx, dout, at(), rows, inputs_, outputs_);
  }
  void multiply_base_back(Float* dx, const Float* dout, int rows) {
    if constexpr (can_multiply_fp8<Float>)
      if (unit_.is_fp8())
        return on_.fp8.input_gradient(dx, dout, unit_.fp8(weight_, false), rows, inputs_, outputs_,
                                      rows == on_.R && on_.fp8.weight_gradients_follow);
    linear_input_gradient(dx, dout, unit_.weight(weight_), rows, inputs_, outputs_, on_.stream);
  }
  // The same where x = gelu(before).
  void multiply_back_gelu(Float* dbefore, const Float* dout, const Float* before, int rows) {
    if (is_plain())
      return linear_gelu_gradient(dbefore, dout, unit_.weight(weight_), before, rows, inputs_, outputs_, on_.stream);
    multiply_back(dbefore, dout, rows);
    gelu_backward(dbefore, before, rows, inputs_, on_.stream, on_.fp8.maximum_of(dbefore, size_t(rows) * inputs_));
  }
  // dout (R,outputs), x (R,inputs). follows: multiply_back() came just before
  void add_weight_gradient(const Float* dout, const Float* x, bool follows) {
    if (is_adapted()) return on_.adapters->weight_gradient(dout, x, at(), on_.R, inputs_, outputs_);
    float *const weight = unit_.gradient(weight_), *const bias = unit_.gradient(bias_);
    const bool adds = unit_.accumulates();
    if (!unit_.is_fp8())
      return linear_weight_gradient(weight, bias, dout, x, on_.R, inputs_, outputs_, adds, on_.reductions, on_.stream);
    if constexpr (can_multiply_fp8<Float>) on_.fp8.weight_gradient(weight, dout, x, on_.R, inputs_, outputs_, adds, follows);
    if (bias) column_sum(bias, dout, on_.R, outputs_, adds, on_.reductions, on_.stream);
  }

  LayerContext<Float>& on_;
  UnitInUse<Float>& unit_;
  int weight_, bias_, inputs_, outputs_;
};

// Each rank has some columns of the weight: x (r,C) → (R,outputs). With one rank gather_then() just calls its lambda
// with x and all rows, and start_scatter() and then_scatter() with the result and all rows.
template <class Float>
class ColumnLinear final : public Linear<Float> {
 public:
  // is_recomputed: forward runs once more before backward, whose rows can be used again.
  ColumnLinear(LayerContext<Float>& context, UnitInUse<Float>& unit, int weight, int bias, int outputs, bool is_recomputed)
      : Linear<Float>(context, unit, weight, bias, context.C(), outputs), is_recomputed_(is_recomputed) {}

  // rows: of all ranks, at most
  Float* lay_out(Arena& arena, int rows) { return rows_ = arena.take<Float>(size_t(rows) * inputs_); }

  void forward(Float* out, const Float* x) {
    on_.tp.gather_then(rows_, x, on_.R, inputs_, [&](const Float* all, Rows rows) {
      this->multiply(rows.of(out, outputs_), rows.of(all, inputs_), unit_.weight(bias_), rows.count);
    });
  }
  // out (R,outputs) = gelu(before), before (R,outputs) = x·weight + bias
  void forward_gelu(Float* out, Float* before, const Float* x) {
    on_.tp.gather_then(rows_, x, on_.R, inputs_, [&](const Float* all, Rows rows) {
      this->multiply_gelu(rows.of(out, outputs_), rows.of(before, outputs_), rows.of(all, inputs_), unit_.weight(bias_),
                          rows.count);
    });
  }

  // out (R,outputs) once more, for backward
  void recompute_gelu(Float* out, const Float* before) { this->gelu(out, before, on_.R); }

  // dx (r,C) from dout (R,outputs). It is there after finish(); in between its sums travel.
  void start_input_gradient(Float* dx, const Float* dout) {
    on_.tp.start_scatter(dx, on_.R, inputs_, [&](Float* terms, Rows rows) {
      this->multiply_back(rows.of(terms, inputs_), rows.of(dout, outputs_), rows.count);
    });
  }
  void finish_input_gradient() { on_.tp.finish_scatter(); }

  // Starts to bring the rows that weight_gradient() will need; they are there after the next start_input_gradient().
  void start_weight_gradient(const Float* x) {
    if (this->is_trained()) on_.tp.start_gather(rows_, x, on_.R, inputs_, is_recomputed_);
  }
  void weight_gradient(const Float* dout, const Float* x, bool is_gathered) override {
    if (!this->is_trained()) return;
    if (!is_gathered) on_.tp.gather(rows_, x, on_.R, inputs_);
    this->add_weight_gradient(dout, on_.tp.size() == 1 ? x : rows_, is_gathered);
  }

 private:
  using Linear<Float>::on_, Linear<Float>::unit_, Linear<Float>::weight_, Linear<Float>::bias_, Linear<Float>::inputs_,
      Linear<Float>::outputs_;
  bool is_recomputed_;
  Float* rows_ = nullptr;  // (R,C): x of all ranks
};

// Each rank has some rows of the weight: x (R,inputs) → (r,C).
template <class Float>
class RowLinear final : public Linear<Float> {
 public:
  RowLinear(LayerContext<Float>& context, UnitInUse<Float>& unit, int weight, int bias, int inputs)
      : Linear<Float>(context, unit, weight, bias, inputs, context.C()) {}

  void forward(Float* out, const Float* x) {
    on_.tp.then_scatter(out, on_.R, outputs_, [&](Float* terms, Rows rows) {
      this->multiply(rows.of(terms, outputs_), rows.of(x, inputs_), on_.tp.once(unit_.weight(bias_)), rows.count);
    });
  }

  // dx (R,inputs) from dout (r,C)
  void input_gradient(Float* dx, const Float* dout) {
    dout_ = on_.tp.gather_then(on_.tp.exchange(), dout, on_.R, outputs_, [&](const Float* all, Rows rows) {
      this->multiply_back(rows.of(dx, inputs_), rows.of(all, outputs_), rows.count);
    });
  }
  // The same where x = gelu(before): dbefore (R,inputs)
  void input_gradient_gelu(Float* dbefore, const Float* dout, const Float* before) {
    dout_ = on_.tp.gather_then(on_.tp.exchange(), dout, on_.R, outputs_, [&](const Float* all, Rows rows) {
      this->multiply_back_gelu(rows.of(dbefore, inputs_), rows.of(all, outputs_), rows.of(before, inputs_), rows.count);
    });
  }

  void weight_gradient(const Float* dout, const Float* x, bool is_gathered) override {
    if (!this->is_trained()) return;
    if (!is_gathered) dout_ = on_.tp.gather(on_.tp.exchange(), dout, on_.R, outputs_);
    this->add_weight_gradient(dout_, x, is_gathered);
  }

 private:
  using Linear<Float>::on_, Linear<Float>::unit_, Linear<Float>::weight_, Linear<Float>::bias_, Linear<Float>::inputs_,
      Linear<Float>::outputs_;
  const Float* dout_ = nullptr;  // (R,C): of all ranks, until the next layer exchanges rows
};
