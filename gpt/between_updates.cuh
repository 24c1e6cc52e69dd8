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
  // Masters have been set by others.
  virtual void forget() {}

  // Begins a change of all units, for which change_unit() is called after later updates; and the change of a unit, begun or not.
  virtual void begin(const Masters&) {}
  virtual void change_unit(int, float*, bool) {}
};
