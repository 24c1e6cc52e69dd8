// The tokens of a batch in device memory, of this rank's rows (B,T).
#pragma once

struct Tokens {
  const int* inputs = nullptr;   // (B,T)  ids
  const int* targets = nullptr;  // (B,T)  the tokens that follow them
  const int* order = nullptr;    // (B·T)  rows, sorted by token
};
