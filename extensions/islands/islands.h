// The options of islands (islands.cuh).
#pragma once

#include <string>

#include "gpt/base/text.h"

// The bits of a code by its name (extensions/compression/kernels/quantize.cuh); 0: values are not sent as codes.
inline int code_bits(const std::string& name) { return name == "int8" ? 8 : name == "int4" ? 4 : 0; }

struct OuterOptions {
  int local_steps = 0;  // H: updates between two outer steps; 0: there are none
  double lr = 0.7, momentum = 0.9;
  std::string dtype = "fp32";  // of messages between islands: fp32, int8 or int4
  int delay = 0;               // N: updates that an island makes meanwhile, less than H

  bool is_on() const { return local_steps > 0; }
  int bits() const { return code_bits(dtype); }
  std::string text() const {
    if (!is_on()) return "off";
    return formatted("each %d steps, lr %g, momentum %g", local_steps, lr, momentum) + (bits() ? ", in " + dtype : "") +
           (delay ? formatted(", %d behind", delay) : "");
  }
};
