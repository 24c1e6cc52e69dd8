// Generates text from the model, for --sample-every, --sample-seconds and --generate.
#pragma once

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include "extensions/generation/options.h"
#include "gpt/batches.cuh"
#include "kernels/gemm/gemm_choices.cuh"

inline Sampler sampler_of(const Options& o, const std::filesystem::path& tokenizer_folder) {
  const TextOptions& text = o.of<TextOptions>();
  return {Tokenizer(o.shape.vocabulary, tokenizer_folder), text.prompt, text.length, text.draw, o.seed};
}

// Computes the logits of next tokens. With a cache (ModelOptions::cached_positions) the model computes each token once:
// the prompt together (prefill), then one token of each text at a time (decode), and when the positions are full, the
// second half of them anew. Without a cache, it computes all tokens that it sees for each new one. Both see the same
// tokens.
class TokenByToken {
 public:
  TokenByToken(Model& model, BatchBuffers& buffers) : model_(model), buffers_(buffers) {}

  std::vector<std::vector<float>> operator()(const std::vector<std::vector<int>>& texts) {
    const size_t tokens = texts[0].size(), first = first_seen(tokens, size_t(model_.options().seq_len));
    const bool decodes = model_.options().cached_positions > 0 && known_ > 0 && first == first_ && tokens == known_ + 1;
    first_ = first;
    known_ = tokens;
    const size_t begin = decodes ? tokens - 1 : first;
    const int count = int(tokens - begin);
    if (rehearsed_ && !rehearsed_->insert({count, decodes}).second) return {};
    run(texts, begin, count, int(begin - first));
    return last_logits(int(texts.size()), count, decodes);
  }

  // Runs the passes for drawing `count` tokens after a prompt, once for each number of tokens that a pass has: the prompt,
  // one token, the second half of the positions. The tokens are 0. When the positions are full, passes repeat themselves
  // after each half of them. So there are few lengths to rehearse, however long the text becomes.
  void rehearse(size_t prompt, size_t count) {
    rehearsed_.emplace();
    const size_t positions = size_t(model_.options().seq_len), end = std::min(prompt + count, std::max(prompt, positions) + positions);
    for (size_t tokens = prompt; tokens < end; ++tokens)
      (*this)(std::vector(size_t(model_.options().samples), std::vector<int>(tokens)));
    rehearsed_.reset();
  }

 private:
  // The logits after the last of `count` tokens of each text. After a prompt only one context-parallel rank has the
  // row. If a rank has one row of each text, the rows are neighbours, and the head computes them together.
  std::vector<std::vector<float>> last_logits(int texts, int count, bool decodes) {
    int cp_rank = 0;
    Positions positions = decodes ? neighbours(1) : model_.positions(count, 0);
    while (positions.row_at(count - 1) < 0) positions = model_.positions(count, ++cp_rank);
    const int at_once = positions.length == 1 ? texts : 1, vocabulary = model_.tensors().shape().vocabulary;
    std::vector<std::vector<float>> logits;
    for (int text = 0; text < texts; text += at_once) {
      const std::vector<float> rows = model_.logits(positions.length * text + positions.row_at(count - 1), at_once, cp_rank);
      for (auto row = rows.begin(); row != rows.end(); row += vocabulary) logits.emplace_back(row, row + vocabulary);
    }
    return logits;
  }

  // Computes tokens [begin, begin + count) of each text, after the `cached` ones that are in the cache. A
  // context-parallel rank computes its own rows of a prompt; a single token is computed by all of them.
  void run(const std::vector<std::vector<int>>& texts, size_t begin, int count, int cached) {
    std::vector<int> inputs;
    for (const std::vector<int>& text : texts) inputs.insert(inputs.end(), text.begin() + long(begin), text.begin() + long(begin) + count);
    const Positions positions = cached > 0 ? neighbours(1) : model_.positions(count);
    const int B = int(texts.size()), rows = round_up(B * positions.length, model_.tensors().tp());
    Batch batch = buffers_.send(inputs.data(), nullptr, B, count, positions, rows);
    if (cached > 0) batch.positions = neighbours(1, cached);
    batch.cached = cached;
    batch.added = model_.options().cached_positions ? count : 0;
    // Prompts, and texts without a cache, have many lengths: timing algorithms for each would not pay off.
    const bool times = std::exchange(gemm_choices().times, gemm_choices().times && cached > 0);
    for (const Action& action : forwards(model_.stage(), 1)) {
      batch.action = action;
      model_.run(batch);
    }
    gemm_choices().times = times;
  }

  Model& model_;
  BatchBuffers& buffers_;
  size_t first_ = 0, known_ = 0;  // the texts' tokens [first_, known_) have been computed
  std::optional<std::set<std::pair<int, bool>>> rehearsed_;  // in a rehearsal: tokens of a pass, and does it decode
};

// Rehearses the passes of a text. (Without a cache each length of it is a pass of its own, and none is timed.)
inline void rehearse_text(const Job& job, Model& model, BatchBuffers& buffers, const Sampler& sampler) {
  if (job.mesh.shape().pp > 1 || model.options().cached_positions > 0)
    TokenByToken(model, buffers).rehearse(sampler.prompt_tokens(), sampler.length());
}
