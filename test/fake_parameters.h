// Parameters without a device, for tests of what saves and loads them: a test says what is copied out, and gets what is
// copied in. As late as on the slowest device, what is copied out is there only when it has been waited for.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gpt/parameters.h"

class FakeParameters : public Parameters {
 public:
  using CopyOut = std::function<void(const CheckpointBlock&, State, float* to)>;
  using CopyIn = std::function<void(const CheckpointBlock&, State, const std::vector<float>& from)>;

  explicit FakeParameters(const ModelShape& shape, CopyOut out = {}) : list(shape), out(out) { kept = shards_.owned_slices(); }
  FakeParameters(const FakeParameters&) = delete;

  const TensorList list;
  std::vector<Slice> kept;  // all tensors, unless a test sets something else
  CopyOut out;
  CopyIn in;

  CheckpointBlock block(const std::string& tensor, size_t first, size_t count, bool gathered = false) const {
    return {&list.find(tensor), first, count, gathered};
  }
  Slice slice(const std::string& tensor, size_t first, size_t count) const { return {&list.find(tensor), first, count, 0}; }
  std::vector<CheckpointBlock> whole_tensors() const { return written_blocks(shards_, most_at_once); }

  const Shards& shards() const override { return shards_; }
  std::vector<Slice> kept_slices() const override { return kept; }
  void copy_out(const CheckpointBlock& block, State state, float* to) override {
    copies_.push_back([this, block, state, to] { out(block, state, to); });
  }
  void copy_in(const CheckpointBlock& block, State state, const std::vector<float>& from) override { in(block, state, from); }
  void wait_for_copies() const override {
    for (const auto& copy : std::exchange(copies_, {})) copy();
  }

  void copy_out(const Slice&, State, float*) const override {}
  void clear() override {}
  void initialize() override {}
  void forget_passes() override {}
  void set_progress(size_t, const LossScale&, std::optional<float>) override {}
  bool waits() const override { return false; }
  std::optional<float> settle_waiting() override { return {}; }
  void visit_values(const Visit&) override {}
  Gradient gradients(int) override { return {}; }
  void outer_step(bool) override {}
  void start_outer_step() override {}
  void update(const AdamW&, float, StepSums*, const StepLimits&) override {}
  GradientSummary* summary() override { return nullptr; }

 private:
  Shards shards_{list, 1, 0};
  mutable std::vector<std::function<void()>> copies_;  // that nobody has waited for
};
