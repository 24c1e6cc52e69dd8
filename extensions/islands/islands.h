// The options of islands (islands.cuh) in words.
#pragma once

#include <string>

#include "gpt/base/text.h"
#include "gpt/step_options.h"

inline std::string text_of(const OuterOptions& o) {
  if (!o.is_on()) return "off";
  return formatted("each %d steps, lr %g, momentum %g", o.local_steps, o.lr, o.momentum) + (o.bits() ? ", in " + o.dtype : "") +
         (o.delay ? formatted(", %d behind", o.delay) : "");
}
