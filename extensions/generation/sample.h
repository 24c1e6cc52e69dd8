// Samples text from a model: draws each next token from its logits by temperature, top-k (Fan et al., arXiv:1805.04833)
// and top-p (Holtzman et al., arXiv:1904.09751), with a seeded generator of its own, so that sampling never changes
// training.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "extensions/generation/tokenizer.h"

struct SampleOptions {
  double temperature = 1;  // 0: always the most likely token
  int top_k = 0;           // draw from the most likely `top_k` tokens; 0: from all
  double top_p = 1;        // and of these from the likeliest whose probabilities make at least this; 1: from all
};

// Computes the logits (V) of the token that follows each of these texts, which have the same number of tokens.
using NextLogits = std::function<std::vector<std::vector<float>>(const std::vector<std::vector<int>>& texts)>;
// Logits that are NaN or infinite: there is no text.
struct NotFinite : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Is called with each piece of text as soon as it is known.
using Show = std::function<void(const std::string& piece)>;

class Sampler {
 public:
  // Fails if the prompt can't be turned into tokens: this must be found before training, not at the first sample. An
  // empty prompt starts from Tokenizer::first_token(). length: number of tokens to draw.
  Sampler(Tokenizer tokenizer, const std::string& prompt, size_t length, const SampleOptions& options, uint64_t seed);

  // number: makes each sample of a run different; the step, for example.
  std::string text(uint64_t number, const NextLogits& next_logits) const { return texts(number, 1, next_logits)[0]; }

  // Samples number to number + count − 1, which are drawn at the same time. A text ends before a token that ends
  // texts. show: is called with the pieces of the first text. Throws NotFinite.
  std::vector<std::string> texts(uint64_t number, int count, const NextLogits& next_logits, const Show& show = {}) const;

  size_t prompt_tokens() const { return prompt_.size(); }
  size_t length() const { return length_; }

 private:
  Tokenizer tokenizer_;
  size_t length_;
  SampleOptions options_;
  uint64_t seed_;
  size_t shown_;  // the text begins at this token
  std::vector<int> prompt_;
};

// The first of `tokens` tokens that a model with `positions` positions sees. When its positions are full, it keeps the
// second half of them, so that half of its positions is free for new tokens.
inline size_t first_seen(size_t tokens, size_t positions) {
  const size_t half = positions > 1 ? positions / 2 : 1;
  return tokens <= positions ? 0 : (tokens - positions + half - 1) / half * half;
}

// Draws texts, and prints the first one as it grows, then the others, with a line of dashes between two texts. Returns
// a line that says how fast that was.
std::string generate_texts(const Sampler& sampler, int count, size_t positions, const NextLogits& next_logits);
