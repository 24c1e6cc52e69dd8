// The layers between which the residual stream runs, and how ranks share them. A block that is made of these layers
// says what is computed, and nothing of who computes it.
//
//   LayerNorm      own rows (r,C), with the addition before it
//   ColumnLinear   from own rows (r,C) to own columns (R,c) of the result
//   RowLinear      from own columns (R,c) to own rows (r,C) of the result
//
// R rows of a batch, C channels. N ranks that share the layers have r = R/N rows and c = C/N columns each; with one
// rank r = R and c = C. The products (gpt/products.cuh) decide how a layer multiplies, and which messages it sends.
#pragma once

#include "gpt/products.cuh"
#include "kernels/layernorm.cuh"

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
  void forward(Float* out, Float* sum, const NormStats& stats, const Residual<Float>& x) const {
    residual_layernorm_forward(out, sum, stats.mean, stats.rstd, x.stream, x.branch, unit_.weight(weight_),
                               unit_.weight(bias_), on_.r, on_.C(), on_.stream, maximum_of(out));
  }

  // dsum (r,C) += the gradient through the norm, from dout (r,C). Writes the gradients of weight and bias, or adds to
  // them, if they are trained.
  void backward(Float* dsum, const Float* dout, const Float* sum, const NormStats& stats) const {
    layernorm_backward(dsum, unit_.gradient(weight_), unit_.gradient(bias_), dout, sum, unit_.weight(weight_), stats.mean,
                       stats.rstd, on_.r, on_.C(), unit_.accumulates(), on_.reductions, on_.stream, maximum_of(dsum));
  }

 private:
  // The next product takes these rows (r,C) themselves only if they are all.
  float* maximum_of(const Float* rows) const { return on_.r == on_.R ? on_.products->maximum_of(rows, on_.elements()) : nullptr; }

  LayerContext<Float>& on_;
  UnitInUse<Float>& unit_;
  int weight_, bias_;
};

// y = x·W + b; (inputs,outputs) is this rank's part of W. weight, bias: numbers of the unit's tensors; UnitInUse::none: no bias
template <class Float>
class Linear {
 public:
  Linear(LayerContext<Float>& context, UnitInUse<Float>& unit, int weight, int bias, int inputs, int outputs, bool is_column)
      : on_(context), weights_{unit, weight, bias, inputs, outputs, is_column} {}

  void forward(Float* out, const Float* x) { on_.products->forward(out, x, weights_, weights_.b(), on_.R); }
  // The gradients of W and b, from dout and x as forward has them. follows: the layer's input gradient came just before.
  void weight_gradient(const Float* dout, const Float* x, bool follows) {
    on_.products->weight_gradient(dout, x, weights_, on_.R, follows);
  }

 protected:
  LayerContext<Float>& on_;
  LayerWeights<Float> weights_;
};

// Each rank has some columns of W: x (r,C) → (R,outputs).
template <class Float>
class ColumnLinear final : public Linear<Float> {
 public:
  ColumnLinear(LayerContext<Float>& context, UnitInUse<Float>& unit, int weight, int bias, int outputs)
      : Linear<Float>(context, unit, weight, bias, context.C(), outputs, true) {}

  // out (R,outputs) = gelu(before), before (R,outputs) = x·W + b
  void forward_gelu(Float* out, Float* before, const Float* x) { on_.products->forward_gelu(out, before, x, weights_, on_.R); }
  // out (R,outputs) once more, for backward
  void recompute_gelu(Float* out, const Float* before) { on_.products->gelu(out, before, on_.R, weights_.outputs); }

  // dx (r,C) from dout (R,outputs). It is there after finish(); in between its sums may travel.
  void start_input_gradient(Float* dx, const Float* dout) { on_.products->input_gradient(dx, dout, weights_, on_.R); }
  void finish_input_gradient() { on_.products->finish_input_gradient(); }

  // weight_gradient() will take this x, after the next input gradient of any layer.
  void start_weight_gradient(const Float* x) { on_.products->start_weight_gradient(x, weights_); }

 private:
  using Linear<Float>::on_, Linear<Float>::weights_;
};

// Each rank has some rows of W: x (R,inputs) → (r,C).
template <class Float>
class RowLinear final : public Linear<Float> {
 public:
  RowLinear(LayerContext<Float>& context, UnitInUse<Float>& unit, int weight, int bias, int inputs)
      : Linear<Float>(context, unit, weight, bias, inputs, context.C(), false) {}

  // dx (R,inputs) from dout (r,C)
  void input_gradient(Float* dx, const Float* dout) { on_.products->input_gradient(dx, dout, weights_, on_.R); }
  // The same where x = gelu(before): dbefore (R,inputs)
  void input_gradient_gelu(Float* dbefore, const Float* dout, const Float* before) {
    on_.products->input_gradient_gelu(dbefore, dout, before, weights_, on_.R);
  }

 private:
  using Linear<Float>::on_, Linear<Float>::weights_;
};
