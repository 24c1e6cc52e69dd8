// The products of a block's layers, y = x·W + b, forward and backward. A layer (gpt/layers.cuh) says what is multiplied, and
// this interface decides how: PlainProducts by kernels/linear.cuh. Another way to multiply wraps the products that are there
// (WrappedProducts), and changes those that concern it.
#pragma once

#include <optional>

#include "gpt/layer_context.cuh"
#include "kernels/linear.cuh"

// W (inputs, outputs) and b (outputs) of a layer, of the unit in use. Where ranks share the layer, each has some columns
// of a column layer's W, or some rows of a row layer's.
template <class Float>
struct LayerWeights {
  const UnitInUse<Float>& unit;
  int weight, bias;  // their numbers among the unit's tensors; UnitInUse::none: there is no bias
  int inputs, outputs;
  bool is_column;

  const Float* w() const { return unit.weight(weight); }
  const Float* b() const { return unit.weight(bias); }
};

// Results come first, then operands; `rows` is the number of rows of both.
template <class Float>
class Products {
 public:
  using Weights = LayerWeights<Float>;
  explicit Products(LayerContext<Float>& context) : on_(context) {}
  virtual ~Products() = default;

  // out (rows,outputs) = x (rows,inputs)·W + bias. bias: of.b(), or zeros where another rank adds it
  virtual void forward(Float* out, const Float* x, const Weights& of, const Float* bias, int rows) = 0;
  // out = gelu(before), before = x·W + b
  virtual void forward_gelu(Float* out, Float* before, const Float* x, const Weights& of, int rows) {
    forward(before, x, of, of.b(), rows);
    gelu(out, before, rows, of.outputs);
  }
  // dx (rows,inputs) = dout (rows,outputs)·Wᵀ. It is there after finish_input_gradient().
  virtual void input_gradient(Float* dx, const Float* dout, const Weights& of, int rows) = 0;
  virtual void finish_input_gradient() {}
  // The same where x = gelu(before), and at once: dbefore = dout·Wᵀ ⊙ gelu'(before)
  virtual void input_gradient_gelu(Float* dbefore, const Float* dout, const Float* before, const Weights& of, int rows) {
    input_gradient(dbefore, dout, of, rows);
    gelu_backward(dbefore, before, rows, of.inputs, on_.stream, maximum_of(dbefore, size_t(rows) * of.inputs));
  }

  // Is W trained, or anything in its place?
  virtual bool trains(const Weights&) const { return true; }
  // weight_gradient() will take this x. The gather of its rows, if any, starts, and has ended after the next input_gradient().
  virtual void start_weight_gradient(const Float*, const Weights&) {}
  // dW = xᵀ·dout and db = Σ dout, written or added. follows: input_gradient() of this layer came just before.
  virtual void weight_gradient(const Float* dout, const Float* x, const Weights& of, int rows, bool follows) = 0;

  // A pass begins: forward, whose activations are kept in the place of this number until backward; or another one, without it.
  virtual void begin(std::optional<int> /*place*/) {}
  // For products that scale by it: where the kernel that now writes `tensor` leaves its largest magnitude; null: nobody needs it
  virtual float* maximum_of(const Float* /*tensor*/, size_t /*count*/) { return nullptr; }
  // For a tensor that is written by launches which leave no maximum: an earlier one is forgotten (before them), or found anew in
  // the tensor as it is (after them), for more than one product.
  virtual void forget_maximum(const Float* /*tensor*/, size_t /*count*/) {}
  virtual void find_maximum(const Float* /*tensor*/, size_t /*count*/) {}

  // out = gelu(before), (rows,columns) each
  void gelu(Float* out, const Float* before, int rows, int columns) {
    gelu_forward(out, before, rows, columns, on_.stream, maximum_of(out, size_t(rows) * columns));
  }

 protected:
  LayerContext<Float>& on_;
};

template <class Float>
class PlainProducts final : public Products<Float> {
 public:
  using typename Products<Float>::Weights;
  using Products<Float>::Products;

  void forward(Float* out, const Float* x, const Weights& of, const Float* bias, int rows) override {
    linear_forward(out, x, of.w(), bias, rows, of.inputs, of.outputs, on_.stream);
  }
  void forward_gelu(Float* out, Float* before, const Float* x, const Weights& of, int rows) override {
    linear_gelu_forward(out, before, x, of.w(), of.b(), rows, of.inputs, of.outputs, on_.stream);
  }
  void input_gradient(Float* dx, const Float* dout, const Weights& of, int rows) override {
    linear_input_gradient(dx, dout, of.w(), rows, of.inputs, of.outputs, on_.stream);
  }
  void input_gradient_gelu(Float* dbefore, const Float* dout, const Float* before, const Weights& of, int rows) override {
    linear_gelu_gradient(dbefore, dout, of.w(), before, rows, of.inputs, of.outputs, on_.stream);
  }
  void weight_gradient(const Float* dout, const Float* x, const Weights& of, int rows, bool) override {
    float *const weight = of.unit.gradient(of.weight), *const bias = of.unit.gradient(of.bias);
    linear_weight_gradient(weight, bias, dout, x, rows, of.inputs, of.outputs, of.unit.accumulates(), on_.reductions, on_.stream);
  }

 private:
  using Products<Float>::on_;
};

// Products around others, which compute all that a class does not override. gelu is computed in one call with a product only where
// the inner products are as they were.
template <class Float>
class WrappedProducts : public Products<Float> {
 public:
  using typename Products<Float>::Weights;
  WrappedProducts(LayerContext<Float>& context, Products<Float>& inner) : Products<Float>(context), inner_(inner) {}

  void forward(Float* out, const Float* x, const Weights& of, const Float* bias, int rows) override {
    inner_.forward(out, x, of, bias, rows);
  }
  void forward_gelu(Float* out, Float* before, const Float* x, const Weights& of, int rows) override {
    changes(of) ? Products<Float>::forward_gelu(out, before, x, of, rows) : inner_.forward_gelu(out, before, x, of, rows);
  }
  void input_gradient(Float* dx, const Float* dout, const Weights& of, int rows) override {
    inner_.input_gradient(dx, dout, of, rows);
  }
  void input_gradient_gelu(Float* dbefore, const Float* dout, const Float* before, const Weights& of, int rows) override {
    changes(of) ? Products<Float>::input_gradient_gelu(dbefore, dout, before, of, rows)
            : inner_.input_gradient_gelu(dbefore, dout, before, of, rows);
  }
  void finish_input_gradient() override { inner_.finish_input_gradient(); }
  bool trains(const Weights& of) const override { return inner_.trains(of); }
  void start_weight_gradient(const Float* x, const Weights& of) override { inner_.start_weight_gradient(x, of); }
  void weight_gradient(const Float* dout, const Float* x, const Weights& of, int rows, bool follows) override {
    inner_.weight_gradient(dout, x, of, rows, follows);
  }
  void begin(std::optional<int> place) override { inner_.begin(place); }
  float* maximum_of(const Float* tensor, size_t count) override { return inner_.maximum_of(tensor, count); }
  void forget_maximum(const Float* tensor, size_t count) override { inner_.forget_maximum(tensor, count); }
  void find_maximum(const Float* tensor, size_t count) override { inner_.find_maximum(tensor, count); }

 protected:
  // Does this class multiply by these weights otherwise than `inner` does?
  virtual bool changes(const Weights&) const { return true; }

  Products<Float>& inner_;
};
