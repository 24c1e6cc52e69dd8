// Backward hands the weight gradient of each product to this class (`later` in gpt.cuh): it is computed at once, or,
// where a schedule of the pipeline splits backward (Work::input and Work::weight, pipeline.h), its operands are kept
// until a pass of its own.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "gpt/layers.cuh"

template <class Float>
class WeightGradients {
 public:
  explicit WeightGradients(LayerContext<Float>& context) : on_(context) {}

  // Lists of operands for `slots` micro-batches in `blocks` blocks, and memory for the copies of dout.
  void lay_out(Arena& arena, int slots, int blocks) {
    kept_.resize(size_t(slots) * size_t(blocks));
    blocks_ = blocks;
    for (Float*& copy : copies_) copy = on_.take_rows(arena);
  }

  // Backward of a block begins; are its gradients left to compute()?
  void begin(int slot, int block, bool are_left) {
    are_left_ = are_left;
    on_.weight_gradients_follow = !are_left;
    now_ = size_t(slot) * size_t(blocks_) + size_t(block);
  }

  // add() will come with this x, whose rows start to travel if it will compute at once.
  void announce(ColumnLinear<Float>& layer, const Float* x) {
    if (!are_left_) layer.start_weight_gradient(x);
  }

  // The gradients of a layer, at once or in compute(). Until then dout must stay: it changes places with `free`, an
  // activation of this slot that is as large, and that nobody needs any more when the block's backward is done. They
  // change places in end(), because the block may still read `free` until then. x stays as it is until the slot is
  // free.
  void add(ColumnLinear<Float>& layer, Float*& dout, const Float* x, Float*& free) {
    if (!are_left_) return layer.weight_gradient(dout, x, true);
    kept_[now_].push_back({&layer, dout, x});
    exchanges_.push_back({&dout, &free});
  }
  // dout (r,C) is the gradient of the residual stream, which goes on: a copy is kept. A block makes two.
  void add(RowLinear<Float>& layer, const Float* dout, const Float* x, Float*& free) {
    if (!are_left_) return layer.weight_gradient(dout, x, true);
    Float*& copy = copies_.at(copied_++);
    CUDA_CHECK(cudaMemcpyAsync(copy, dout, on_.elements() * sizeof(Float), cudaMemcpyDeviceToDevice, on_.stream));
    kept_[now_].push_back({&layer, copy, x});
    exchanges_.push_back({&copy, &free});
  }

  // The block's backward is done. Returns whether all its gradients are.
  bool end() {
    for (const auto& [kept, free] : exchanges_) std::swap(*kept, *free);
    exchanges_.clear();
    copied_ = 0;
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

  LayerContext<Float>& on_;
  std::vector<std::vector<Kept>> kept_;               // by slot and block
  std::vector<std::pair<Float**, Float**>> exchanges_;  // of the block under way
  std::array<Float*, 2> copies_ = {};                 // (r,C) each
  size_t copied_ = 0, now_ = 0;
  int blocks_ = 0;
  bool are_left_ = false;
};
