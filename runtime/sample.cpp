#include "runtime/sample.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <utility>

namespace {

// Draws a token id with probability softmax(logits / temperature), from the top_k most likely ones.
int sample_token(const std::vector<float>& logits, const SampleOptions& options, std::mt19937_64& generator) {
  std::vector<int> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  auto likelier = [&](int a, int b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  if (options.temperature == 0) return *std::min_element(ids.begin(), ids.end(), likelier);
  if (options.top_k > 0 && size_t(options.top_k) < ids.size()) {
    std::nth_element(ids.begin(), ids.begin() + options.top_k, ids.end(), likelier);
    ids.resize(options.top_k);
    std::sort(ids.begin(), ids.end());  // the order that nth_element leaves depends on the standard library
  }
  double maximum = -INFINITY, sum = 0;
  for (int id : ids) maximum = std::max(maximum, double(logits[id]));
  std::vector<double> cumulative;
  for (int id : ids) cumulative.push_back(sum += std::exp((logits[id] - maximum) / options.temperature));
  const double uniform = double(generator() >> 11) * 0x1p-53 * sum;
  const size_t index = std::upper_bound(cumulative.begin(), cumulative.end(), uniform) - cumulative.begin();
  return ids[std::min(index, ids.size() - 1)];
}

}  // namespace

Sampler::Sampler(Tokenizer tokenizer, const std::string& prompt, size_t length, const SampleOptions& options, uint64_t seed)
    : tokenizer_(std::move(tokenizer)), length_(length), options_(options), seed_(seed), shown_(prompt.empty() ? 1 : 0) {
  prompt_ = prompt.empty() ? std::vector<int>{tokenizer_.first_token()} : tokenizer_.encode(prompt);
}

std::string Sampler::text(uint64_t number, const NextLogits& next_logits) const {
  std::vector<int> tokens = prompt_;
  std::mt19937_64 generator(seed_ * 1000003 + number);
  for (size_t i = 0; i < length_; ++i) tokens.push_back(sample_token(next_logits(tokens), options_, generator));
  return tokenizer_.decode({tokens.begin() + long(shown_), tokens.end()});
}

void print_sample(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::putchar('\n');
}
