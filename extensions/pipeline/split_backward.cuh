// Zero bubble's halves of backward: Work::input leaves the weight gradients of a block's products to a pass of their own,
// Work::weight, and keeps their operands until then.
#pragma once

#include <array>
#include <map>
#include <utility>
#include <vector>

#include "gpt/weight_gradients.cuh"

template <class Float>
class SplitWeightGradients final : public WeightGradients<Float> {
 public:
  explicit SplitWeightGradients(LayerContext<Float>& context) : on_(context) {}

  // Memory for the copies of dout.
  void lay_out(Arena& arena) {
    for (Float*& copy : copies_) copy = on_.take_rows(arena);
  }

  void begin(const Action& action, int block) override {
    are_left_ = action.work == Work::input;
    on_.weight_gradients_follow = !are_left_;
    now_ = &kept_[{action.slot, block}];
  }

  void announce(ColumnLinear<Float>& layer, const Float* x) override {
    if (!are_left_) AtOnce::announce(layer, x);
  }

  // Until compute() dout must stay: it changes places with `free`. They change places in end(), because the block may
  // still read `free` until then. x stays as it is until the slot is free.
  void add(ColumnLinear<Float>& layer, Float*& dout, const Float* x, Float*& free) override {
    if (!are_left_) return AtOnce::add(layer, dout, x, free);
    now_->push_back({&layer, dout, x});
    exchanges_.push_back({&dout, &free});
  }
  // A copy of dout is kept. A block makes two.
  void add(RowLinear<Float>& layer, const Float* dout, const Float* x, Float*& free) override {
    if (!are_left_) return AtOnce::add(layer, dout, x, free);
    Float*& copy = copies_.at(copied_++);
    CUDA_CHECK(cudaMemcpyAsync(copy, dout, on_.elements() * sizeof(Float), cudaMemcpyDeviceToDevice, on_.stream));
    now_->push_back({&layer, copy, x});
    exchanges_.push_back({&copy, &free});
  }

  bool end() override {
    for (const auto& [kept, free] : exchanges_) std::swap(*kept, *free);
    exchanges_.clear();
    copied_ = 0;
    return !are_left_;
  }

  void compute(int slot, int block) override {
    std::vector<Kept>& left = kept_[{slot, block}];
    for (const Kept& k : left) k.layer->weight_gradient(k.dout, k.x, false);
    left.clear();
  }

 private:
  using AtOnce = WeightGradients<Float>;
  struct Kept {
    Linear<Float>* layer;
    const Float *dout, *x;
  };

  LayerContext<Float>& on_;
  std::map<std::pair<int, int>, std::vector<Kept>> kept_;  // by slot and block
  std::vector<Kept>* now_ = nullptr;                       // of the block under way
  std::vector<std::pair<Float**, Float**>> exchanges_;     // of the block under way
  std::array<Float*, 2> copies_ = {};                      // (r,C) each
  size_t copied_ = 0;
  bool are_left_ = false;
};
