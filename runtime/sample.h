// Text from a model: the next token drawn from logits by temperature and top-k (Fan et al. 2018), with a seeded
// generator of its own, so that sampling never disturbs training.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/tokenizer.h"

struct SampleOptions {
  double temperature = 1;  // 0: always the likeliest token
  int top_k = 0;           // 0: all tokens
};

// Of the token that follows `tokens`.
using NextLogits = std::function<std::vector<float>(const std::vector<int>& tokens)>;

class Sampler {
 public:
  // Fails if the prompt can't be turned into tokens: better before training than at the first sample. An empty one
  // starts from Tokenizer::first_token().
  Sampler(Tokenizer tokenizer, const std::string& prompt, size_t length, const SampleOptions& options, uint64_t seed);

  // `number` makes each sample of a run its own.
  std::string text(uint64_t number, const NextLogits& next_logits) const;

 private:
  Tokenizer tokenizer_;
  size_t length_;
  SampleOptions options_;
  uint64_t seed_;
  size_t shown_;  // tokens before this one are not part of the text
  std::vector<int> prompt_;
};

// And a line end. A sample may hold any byte, NUL among them.
void print_sample(const std::string& text);
