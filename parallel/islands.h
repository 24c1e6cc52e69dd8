// The options of islands (islands.cuh).
#pragma once

#include <string>

#include "parallel/processes/text.h"

struct OuterOptions {
  int local_steps = 0;  // H: updates between two outer steps; 0: there are none
  double lr = 0.7, momentum = 0.9;
  std::string dtype = "fp32";  // of what travels between islands: fp32, int8 or int4

  bool is_on() const { return local_steps > 0; }
  int bits() const { return dtype == "int8" ? 8 : dtype == "int4" ? 4 : 32; }
  std::string text() const {
    if (!is_on()) return "off";
    return formatted("each %d steps, lr %g, momentum %g", local_steps, lr, momentum) + (bits() < 32 ? ", in " + dtype : "");
  }
};
