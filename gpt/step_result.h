// The results of a step, and of a validation.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

struct StepResult {
  size_t step;  // number of updates done, from 1
  double loss, norm, learning_rate, seconds;
  bool applied;       // false: the update was left out
  double loss_scale;  // of the next step; 0: none is used
  int of_islands = 0; // whose mean loss and norm are; 1: the first one's; 0: there is only one
};

// The losses of a validation on each set, with their keys.
using ValidationLosses = std::vector<std::pair<std::string, double>>;
