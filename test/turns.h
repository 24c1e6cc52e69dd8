// Of many that are alike, make test takes a part, and another one after each commit. test/run.sh says which by GPT_TURN, a
// number, and GPT_CASES_TURN (run_cases.h). Without them, as in make test-all, all have their turn.
#pragma once

#include <cstdlib>
#include <vector>

// Is it this one's turn? It is once in `parts` numbers GPT_TURN.
inline bool has_turn(int number, int parts = 2) {
  const char* turn = std::getenv("GPT_TURN");
  return !turn || (number + std::atoi(turn)) % parts == 0;
}

// Those whose turn it is.
template <class T>
std::vector<T> in_turn(const std::vector<T>& all, int parts = 2) {
  std::vector<T> taken;
  for (size_t i = 0; i < all.size(); ++i)
    if (has_turn(int(i), parts)) taken.push_back(all[i]);
  return taken;
}
