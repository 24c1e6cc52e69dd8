// Changes of masters between two updates, beside the optimizer's: here none.
#pragma once

#include <functional>

#include "gpt/shards.h"
#include "kernels/device/memory.cuh"
#include "kernels/update.h"

class BetweenUpdates {
 public:
  using Masters = std::function<float*(int unit)>;  // those of this rank's piece of the unit

  virtual ~BetweenUpdates() = default;
  virtual void add_to(DeviceMemory&) {}
  // Its state is as before the first step.
  virtual void clear() {}
  // Where a slice's values of its state are; null: it has no such state.
  virtual float* kept(State, const Slice&) const { return nullptr; }

  virtual void before_update(const Masters&) {}
  // Other masters have been set.
  virtual void forget() {}

  // Changes a unit, all units one after the other. is_under_way: begin() has been called, some updates ago
  virtual void change_unit([[maybe_unused]] int unit, [[maybe_unused]] float* masters, [[maybe_unused]] bool is_under_way) {}
  virtual void begin(const Masters&) {}
};
