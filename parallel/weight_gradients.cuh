// Where backward takes the gradients of matrices: they are computed at once, or, where a schedule of the pipeline splits
// backward (Work::input and Work::weight, pipeline.h), what they need is kept until their own pass.
#pragma once

#include <utility>
#include <vector>

#include "parallel/layers.cuh"

template <class Float>
class WeightGradients {
 public:
  explicit WeightGradients(LayerContext<Float>& context) : on_(context) {}

  // splits: backward will be split, so two tensors (rows,C) are needed, and what `slots` micro-batches keep of `blocks` blocks.
  void lay_out(Arena& arena, bool splits, int slots, int blocks, int rows) {
    if (!splits) return;
    kept_.resize(size_t(slots) * size_t(blocks));
    blocks_ = blocks;
    for (Float*& spare : spare_) spare = arena.take<Float>(size_t(rows) * on_.C());
  }

  // Backward of a block begins; are its gradients left to compute()?
  void begin(int slot, int block, bool are_left) {
    are_left_ = are_left;
    now_ = size_t(slot) * size_t(blocks_) + size_t(block);
  }

  // A layer's input, which add() will name.
  void announce(ColumnLinear<Float>& layer, const Float* x) {
    if (!are_left_) layer.start_weight_gradient(x);
  }

  // The gradients of a layer. x stays as it is until the micro-batch ends; `free` is as large as dout, and nobody needs it when
  // the block's backward is done: there dout is kept. It takes the place of dout in the next block.
  void add(ColumnLinear<Float>& layer, Float*& dout, const Float* x, Float*& free) {
    if (are_left_) exchanges_.push_back({&layer, &dout, x, &free});
    else layer.weight_gradient(dout, x, true);
  }
  // dout (r,C) is the gradient of the residual stream, which goes on: a copy is kept.
  void add(RowLinear<Float>& layer, const Float* dout, const Float* x, Float*& free) {
    if (!are_left_) return layer.weight_gradient(dout, x, true);
    Float*& copy = spare_[copies_++];
    CUDA_CHECK(cudaMemcpyAsync(copy, dout, size_t(on_.r) * on_.C() * sizeof(Float), cudaMemcpyDeviceToDevice, on_.stream));
    exchanges_.push_back({&layer, &copy, x, &free});
  }

  // The block's backward is done. Returns whether all its gradients are.
  bool end() {
    for (const Exchange& e : exchanges_) {
      std::swap(*e.dout, *e.free);
      kept_[now_].push_back({e.layer, *e.free, e.x});
    }
    exchanges_.clear();
    copies_ = 0;
    return !are_left_;
  }

  // The gradients that a block has left.
  void compute(int slot, int block) {
    std::vector<Kept>& left = kept_[size_t(slot) * size_t(blocks_) + size_t(block)];
    for (const Kept& k : left) k.layer->weight_gradient(k.dout, k.x, false);
    left.clear();
  }

 private:
  struct Kept {
    Linear<Float>* layer;
    const Float *dout, *x;
  };
  struct Exchange {
    Linear<Float>* layer;
    Float** dout;
    const Float* x;
    Float** free;
  };

  LayerContext<Float>& on_;
  std::vector<std::vector<Kept>> kept_;  // by slot and block
  std::vector<Exchange> exchanges_;      // of the block under way
  Float* spare_[2] = {};                 // (r,C) each
  int copies_ = 0, blocks_ = 0;
  size_t now_ = 0;
  bool are_left_ = false;
};
