// Options for steps that go wrong (runtime/guard/guard.h).
#pragma once

#include <cstddef>
#include <string>

struct GuardOptions {
  std::string on_spike = "log";  // or skip, rollback
  double z = 6;
  size_t window = 128, most_in_a_row = 100, most_rollbacks = 3;
};
