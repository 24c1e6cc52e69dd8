// Samples text from a model: draws each next token from its logits by temperature and top-k (Fan et al. 2018), with a
// seeded generator of its own, so that sampling never changes training.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/tokenizer.h"

struct SampleOptions {
  double temperature = 1;  // 0: always the most likely token
  int top_k = 0;           // draw from the most likely `top_k` tokens; 0: from all
};

// Computes the logits (V) of the token that follows `tokens`.
using NextLogits = std::function<std::vector<float>(const std::vector<int>& tokens)>;

class Sampler {
 public:
  // Fails if the prompt can't be turned into tokens: this must be found before training, not at the first sample. An
  // empty prompt starts from Tokenizer::first_token(). length: number of tokens to draw.
  Sampler(Tokenizer tokenizer, const std::string& prompt, size_t length, const SampleOptions& options, uint64_t seed);

  // number: makes each sample of a run different; the step, for example.
  std::string text(uint64_t number, const NextLogits& next_logits) const;

 private:
  Tokenizer tokenizer_;
  size_t length_;
  SampleOptions options_;
  uint64_t seed_;
  size_t shown_;  // the text begins at this token
  std::vector<int> prompt_;
};

// Prints the text and a line end. The text may hold any byte, NUL included.
void print_sample(const std::string& text);
