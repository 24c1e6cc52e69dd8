// Of many that are alike, make test takes a part, and another one after each commit.
#pragma once

#include <cstdlib>

// Is it this one's turn? GPT_TURN is the number of commits (run.sh). Without it, as in make test-all, it always is.
inline bool has_turn(int number, int parts = 2) {
  const char* turn = std::getenv("GPT_TURN");
  return !turn || (number + std::atoi(turn)) % parts == 0;
}
