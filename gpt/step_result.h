// The results of a step, and of a validation.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

struct StepResult {
  size_t step = 0;  // number of updates done, from 1
  double loss = 0, norm = 0, learning_rate = 0, seconds = 0;
  bool applied = false;   // false: the update was left out
  double loss_scale = 0;  // of the next step; 0: none is used
  int of_islands = 0;  // loss and norm are the mean of so many; 1: those of the first; 0: there are none
};

// The losses of a validation on each set, with their keys.
using ValidationLosses = std::vector<std::pair<std::string, double>>;
