// Drawing the next token from logits: temperature, top-k (Fan et al. 2018), and a seeded generator of its own, so that
// sampling never disturbs training.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

struct SampleOptions {
  double temperature = 1;  // 0: always the likeliest token
  int top_k = 0;           // 0: all tokens
};

// A token id with probability softmax(logits / temperature), among the top_k likeliest.
inline int sample_token(const std::vector<float>& logits, const SampleOptions& options, std::mt19937_64& generator) {
  std::vector<int> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  auto likelier = [&](int a, int b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  if (options.temperature == 0) return *std::min_element(ids.begin(), ids.end(), likelier);
  if (options.top_k > 0 && size_t(options.top_k) < ids.size()) {
    std::nth_element(ids.begin(), ids.begin() + options.top_k, ids.end(), likelier);
    ids.resize(options.top_k);
    std::sort(ids.begin(), ids.end());  // nth_element leaves an order that depends on the library
  }
  double maximum = -INFINITY, sum = 0;
  for (int id : ids) maximum = std::max(maximum, double(logits[id]));
  std::vector<double> cumulative;
  for (int id : ids) cumulative.push_back(sum += std::exp((logits[id] - maximum) / options.temperature));
  const double uniform = double(generator() >> 11) * 0x1p-53 * sum;
  const size_t index = std::upper_bound(cumulative.begin(), cumulative.end(), uniform) - cumulative.begin();
  return ids[std::min(index, ids.size() - 1)];
}
