// Where backward hands in the weight gradient of each product (`later` in gpt.cuh). Here it is computed at once. A room may
// put another class in its place, which keeps the operands for a pass of its own (Work::weight).
#pragma once

#include "gpt/layers.cuh"

template <class Float>
struct WeightGradients {
  virtual ~WeightGradients() = default;
  // Backward of a block begins, which has this number in its chunk.
  virtual void begin(const Action&, int /*block*/) {}
  // add() will come with this x, whose rows start to travel if it will compute at once.
  virtual void announce(ColumnLinear<Float>& layer, const Float* x) { layer.start_weight_gradient(x); }
  // The gradients of a layer. free: an activation of this block, as large as dout, that nobody needs after its backward.
  virtual void add(ColumnLinear<Float>& layer, Float*& dout, const Float* x, Float*& /*free*/) { layer.weight_gradient(dout, x, true); }
  // dout (r,C) is the gradient of the residual stream, which goes on.
  virtual void add(RowLinear<Float>& layer, const Float* dout, const Float* x, Float*& /*free*/) { layer.weight_gradient(dout, x, true); }
  // The block's backward is done. Returns whether all its gradients are.
  virtual bool end() { return true; }
  // The gradients that a block has left.
  virtual void compute(int /*slot*/, int /*block*/) {}
};
