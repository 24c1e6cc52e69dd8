// The arrays of gradients with --delay 1, from the backward that computes them to the update that applies them. Two take turns
// after each step: while backward writes one of them, the other is summed over the ranks, during a whole step. The end of the step
// applies it:
//
//   w(s+1) = w(s) − AdamW(g(s−1))
//
// So the first step applies nothing. An update without a step before it applies the waiting gradients, and leaves none.
#pragma once

#include <utility>

#include "gpt/gradient_home.cuh"

class DelayedGradients final : public GradientHome {
 public:
  using GradientHome::GradientHome;

  void lay_out(Arena& arena) override {
    for (float** array : {&applied_, &written_}) *array = arena.take<float>(count());
    loss_ = arena.take<float>(1);
  }
  void clear(cudaStream_t stream) override {
    GradientHome::clear(stream);
    is_fresh_ = false;
  }

  void begin_micro_step() override { is_fresh_ = true; }
  bool is_behind() const override { return true; }

  bool has_applied() const override { return waits_; }
  bool begin_completion() override { return !std::exchange(is_complete_, true); }
  const float* loss(const float*) const override { return loss_; }
  void keep_loss(const float* of_step, cudaStream_t stream) override {
    CUDA_CHECK(cudaMemcpyAsync(loss_, of_step, sizeof(float), cudaMemcpyDefault, stream));
  }
  bool take_turns() override {
    waits_ = std::exchange(is_fresh_, false);
    is_complete_ = false;
    if (waits_) std::swap(written_, applied_);
    return waits_;
  }

  bool has_waiting() const override { return waits_; }
  std::optional<float> waiting(cudaStream_t stream) const override {
    if (!waits_) return {};
    float loss = 0;
    copy_and_wait(&loss, loss_, 1, cudaMemcpyDeviceToHost, stream);
    return loss;
  }
  void set_waiting(std::optional<float> loss, cudaStream_t stream) override {
    waits_ = is_complete_ = loss.has_value();
    if (waits_) copy_and_wait(loss_, &*loss, 1, cudaMemcpyHostToDevice, stream);
    else GradientHome::set_waiting(loss, stream);
  }

 private:
  float* loss_ = nullptr;     // of the batch whose gradients wait
  bool is_fresh_ = false;     // has a step written gradients since the last update?
  bool waits_ = false;        // are the gradients to be applied those of the step before?
  bool is_complete_ = false;  // have their sums over ranks arrived?
};
