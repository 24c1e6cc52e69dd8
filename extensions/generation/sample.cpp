#include "extensions/generation/sample.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <utility>

#include "gpt/base/error.h"
#include "gpt/base/process.h"
#include "gpt/base/text.h"

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
  if (options.top_p < 1) std::sort(ids.begin(), ids.end(), likelier);
  double maximum = -INFINITY, sum = 0;
  for (int id : ids) maximum = std::max(maximum, double(logits[id]));
  std::vector<double> cumulative;
  for (int id : ids) cumulative.push_back(sum += std::exp((logits[id] - maximum) / options.temperature));
  if (options.top_p < 1) {  // the shortest beginning that makes top_p, at least one token
    const size_t kept = 1 + size_t(std::ranges::lower_bound(cumulative, options.top_p * sum) - cumulative.begin());
    cumulative.resize(std::min(kept, cumulative.size()));
    sum = cumulative.back();
  }
  const double uniform = double(generator() >> 11) * 0x1p-53 * sum;
  const size_t index = std::upper_bound(cumulative.begin(), cumulative.end(), uniform) - cumulative.begin();
  return ids[std::min(index, ids.size() - 1)];
}

}  // namespace

Sampler::Sampler(Tokenizer tokenizer, const std::string& prompt, size_t length, const SampleOptions& options, uint64_t seed)
    : tokenizer_(std::move(tokenizer)), length_(length), options_(options), seed_(seed), shown_(prompt.empty() ? 1 : 0) {
  prompt_ = prompt.empty() ? std::vector<int>{tokenizer_.first_token()} : tokenizer_.encode(prompt);
}

std::vector<std::string> Sampler::texts(uint64_t number, int count, const NextLogits& next_logits, const Show& show) const {
  std::vector<std::vector<int>> tokens(size_t(count), prompt_);
  std::vector<std::mt19937_64> generators;
  for (int i = 0; i < count; ++i) generators.emplace_back(seed_ * 1000003 + number + uint64_t(i));
  std::vector<size_t> ends(size_t(count), prompt_.size() + length_);  // where each text ends
  const auto text_of = [&](size_t i, size_t begin) {
    const size_t end = std::min(ends[i], tokens[i].size());
    return begin < end ? tokenizer_.decode({tokens[i].begin() + long(begin), tokens[i].begin() + long(end)}) : "";
  };
  if (show) show(text_of(0, shown_));
  const auto goes_on = [&](size_t end) { return tokens[0].size() < end; };
  while (std::ranges::any_of(ends, goes_on)) {
    const std::vector<std::vector<float>> logits = next_logits(tokens);
    for (size_t i = 0; i < tokens.size(); ++i) {  // texts that have ended go on, too, as all have the same length
      if (!std::ranges::all_of(logits[i], [](float logit) { return std::isfinite(logit); })) {
        if (show) show("\n");
        throw NotFinite(concat("the logits after token ", tokens[i].size(), " are not finite: if --dtype is fp16, whose numbers end "
                               "at 65504, give bf16 or fp32; else take weights from before they broke"));
      }
      const int token = sample_token(logits[i], options_, generators[i]);
      if (std::ranges::count(tokenizer_.end_tokens(), token) > 0) ends[i] = std::min(ends[i], tokens[i].size());
      tokens[i].push_back(token);
    }
    if (show) show(text_of(0, tokens[0].size() - 1));
  }
  std::vector<std::string> texts;
  for (size_t i = 0; i < tokens.size(); ++i) texts.push_back(text_of(i, shown_));
  return texts;
}

std::string generate_texts(const Sampler& sampler, int count, size_t positions, const NextLogits& next_logits) {
  const Clock::time_point begin = Clock::now();
  double prefill = 0;  // seconds
  size_t steps = 0;
  const auto timed = [&](const std::vector<std::vector<int>>& tokens) {
    std::vector<std::vector<float>> logits = next_logits(tokens);
    if (++steps == 1) prefill = seconds_since(begin);
    return logits;
  };
  const auto show = [](const std::string& piece) {
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    require_printed();
  };
  const std::vector<std::string> texts = sampler.texts(0, count, timed, show);
  std::putchar('\n');
  for (size_t i = 1; i < texts.size(); ++i) {
    std::printf("---\n");
    std::fwrite(texts[i].data(), 1, texts[i].size(), stdout);  // which may hold any byte
    std::putchar('\n');
  }
  require_printed();
  if (steps < 2) return "";
  const double rate = double(steps - 1) * count / (seconds_since(begin) - prefill);
  const size_t prompt = sampler.prompt_tokens(), unseen = first_seen(prompt, positions);
  const std::string seen = unseen ? formatted("the last %zu of its ", prompt - unseen) : "";
  return formatted("%.1f tokens/s; the prompt took %.1f ms for %s%zu tokens", rate, 1e3 * prefill,
                   seen.c_str(), prompt);
}
