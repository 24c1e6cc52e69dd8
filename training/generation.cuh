// Generates text from the model, for --sample-every and --generate.
#pragma once

#include <algorithm>
#include <filesystem>

#include "kernels/gemm_choices.cuh"
#include "runtime/sample.h"
#include "training/batches.cuh"

inline Sampler sampler_of(const Options& o, const ModelShape& shape, const std::filesystem::path& tokenizer_folder) {
  return {Tokenizer(shape.vocabulary, tokenizer_folder), o.prompt, o.sample_len, {o.temperature, o.top_k}, o.seed};
}

// Returns a function that computes the logits (V) of the token after `tokens`. The model sees only the last seq_len of
// them.
inline NextLogits next_logits_of(Model& model, BatchBuffers& buffers) {
  return [&](const std::vector<int>& tokens) {
    const int count = int(std::min(tokens.size(), size_t(model.options().seq_len)));
    const int rows = round_up(count, model.tensors().tp());
    Batch batch = buffers.send(tokens.data() + tokens.size() - size_t(count), nullptr, 1, count, rows);
    const Untimed untimed;  // every sequence has another length, and timing algorithms for each would not pay off
    for (const Action& action : forwards(model.stage(), 1)) {
      batch.action = action;
      model.run(batch);
    }
    return model.logits(count - 1, 1);
  };
}
