// The options of islands (islands.cuh).
#pragma once

#include <string>

#include "parallel/processes/text.h"

struct OuterOptions {
  int local_steps = 0;  // H: updates between two outer steps; 0: there are none
  double lr = 0.7, momentum = 0.9;

  bool is_on() const { return local_steps > 0; }
  std::string text() const { return is_on() ? formatted("each %d steps, lr %g, momentum %g", local_steps, lr, momentum) : "off"; }
};
