// How many checks have passed.
#pragma once

#include <cstdio>

namespace ladder {

struct Verdict {
  int passed = 0, failed = 0;

  void add(bool is_right) { ++(is_right ? passed : failed); }
  // Prints the result in doctest's words, for test/run.sh.
  void print() const {
    std::printf("cases: %d passed, %d failed, 0 skipped\n", passed, failed);
  }
};

}  // namespace ladder
