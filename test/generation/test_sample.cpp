// Drawing tokens from logits, and texts from tokens, by a model that is a table.
#include "extensions/generation/sample.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <doctest/doctest.h>

namespace {

// Only these four bytes are likely, with these probabilities.
const std::vector<std::pair<char, double>> likely = {{'a', 0.5}, {'b', 0.3}, {'c', 0.15}, {'d', 0.05}};

std::vector<float> table() {
  std::vector<float> logits(256, -1e9f);
  for (const auto& [letter, probability] : likely) logits[size_t(letter)] = float(std::log(probability));
  return logits;
}

std::vector<std::vector<float>> next_of_table(const std::vector<std::vector<int>>& texts) { return {texts.size(), table()}; }

std::string drawn(const SampleOptions& options, size_t count = 2000) {
  return Sampler(Tokenizer(256, ""), "", count, options, 1).text(0, next_of_table);
}

std::set<char> letters(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

TEST_CASE("tokens are drawn by their probabilities, or from the likeliest only") {
  const std::string text = drawn({});
  REQUIRE(text.size() == 2000);
  for (const auto& [letter, probability] : likely) {  // four standard deviations
    const double share = double(std::count(text.begin(), text.end(), letter)) / 2000;
    CHECK(std::abs(share - probability) < 4 * std::sqrt(probability * (1 - probability) / 2000));
  }
  CHECK(letters(drawn({.temperature = 0})) == std::set{'a'});
  CHECK(letters(drawn({.top_k = 2})) == std::set{'a', 'b'});
  CHECK(letters(drawn({.top_p = 0.4})) == std::set{'a'});
  CHECK(letters(drawn({.top_p = 0.7})) == std::set{'a', 'b'});
  CHECK(letters(drawn({.top_p = 0.9})) == std::set{'a', 'b', 'c'});
  CHECK(letters(drawn({.top_k = 2, .top_p = 0.9})) == std::set{'a', 'b'});
  CHECK(drawn({.temperature = 0.01}) == drawn({.temperature = 0}));
}

TEST_CASE("several texts at a time equal texts drawn one after the other, and the first one is shown as it grows") {
  const Sampler sampler(Tokenizer(256, ""), "ab", 20, {}, 3);
  std::string shown;
  size_t pieces = 0;
  const std::vector<std::string> texts = sampler.texts(5, 3, next_of_table, [&](const std::string& piece) {
    shown += piece;
    ++pieces;
  });
  REQUIRE(texts.size() == 3);
  for (uint64_t i = 0; i < 3; ++i) CHECK(texts[i] == sampler.text(5 + i, next_of_table));
  CHECK(texts[0] != texts[1]);
  CHECK(texts[0].starts_with("ab"));
  CHECK(shown == texts[0]);
  CHECK(pieces == 21);  // the prompt, then a token at a time
}

TEST_CASE("logits that are not finite are no text, also if a single one of them is not") {
  for (const float value : {NAN, INFINITY, -INFINITY})
    for (const SampleOptions& options : {SampleOptions{.temperature = 0}, {.top_k = 3}, {.top_p = 0.5}, {}}) {
      const auto next = [&](const std::vector<std::vector<int>>& texts) {
        std::vector<std::vector<float>> logits = next_of_table(texts);
        if (texts[0].size() == 4) logits[1][200] = value;
        return logits;
      };
      const Sampler sampler(Tokenizer(256, ""), "ab", 5, options, 3);
      std::string shown;
      CHECK_THROWS_AS(sampler.texts(0, 2, next, [&](const std::string& piece) { shown += piece; }), NotFinite);
      CHECK(shown.size() == 5);  // the prompt, two tokens, and the line's end
      CHECK_THROWS_WITH(sampler.text(0, [](const auto&) { return std::vector(1, std::vector<float>(256, NAN)); }),
                        doctest::Contains("after token 2 are not finite"));
    }
}

TEST_CASE("a text ends before the token that ends texts, while others go on") {
  constexpr int end = 50256;
  const Tokenizer tokenizer(end + 1, "");  // ids as numbers
  CHECK(tokenizer.end_tokens() == std::vector{end});
  CHECK(Tokenizer(256, "").end_tokens().empty());
  // The first text ends after its third token, the second after its fifth: token 7 until then.
  size_t calls = 0;
  const auto next = [&](const std::vector<std::vector<int>>& texts) {
    std::vector<std::vector<float>> logits(texts.size(), std::vector<float>(end + 1));
    for (size_t i = 0; i < texts.size(); ++i) logits[i][texts[i].size() == 4 + 2 * i ? end : 7] = 1;
    ++calls;
    return logits;
  };
  const Sampler sampler(tokenizer, "", 9, {.temperature = 0}, 1);  // the prompt is one token
  const std::vector<std::string> texts = sampler.texts(0, 2, next);
  CHECK(texts[0] == "7 7 7 ");
  CHECK(texts[1] == "7 7 7 7 7 ");
  CHECK(calls == 6);
  CHECK(sampler.text(0, next) == texts[0]);
  CHECK(calls == 10);
}
