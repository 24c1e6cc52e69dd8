// LoRA, low-rank adaptation (Hu et al., arXiv:2106.09685), as PEFT defines it: the weight and the bias of a linear layer
// stay as they are, and two small matrices beside them, its *adapter*, are trained:
//
//   y = x·W + b + s·(x·Aᵀ)·Bᵀ,   W (inputs, outputs), A (rank, inputs), B (outputs, rank), s = alpha / rank
//
// B starts at zero, so the first loss is that of the base model. Adapters have a list of tensors and a parameter store
// of their own (parallel/lora.cuh): ZeRO shards them, and checkpoints hold them, as those of any other model.
//
// Tensor parallelism splits an adapter as it splits W, and sends nothing more. Where W is split by columns, each rank
// has all of x·Aᵀ, and some rows of B. Where it is split by rows, each rank has some columns of A, so its part of
// x·Aᵀ is one term of a sum; the product with B is linear, and the sum is the one that the layer makes anyway.
#pragma once

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "parallel/tensors.h"

struct LoraOptions {
  int rank = 0;  // 0: there are no adapters, and all tensors of the model are trained
  double alpha = 0;
  std::vector<std::string> modules = {};  // whose weights have adapters, by their names in a block

  bool is_on() const { return rank > 0; }
  float scale() const { return float(alpha / rank); }
  bool adapts(const std::string& module) const { return std::ranges::count(modules, module) > 0; }
  bool operator==(const LoraOptions&) const = default;
  // "rank 16, alpha 32, attn.c_attn mlp.c_fc", or "off"
  std::string text() const {
    std::ostringstream text;
    text << "rank " << rank << ", alpha " << alpha << ',';
    for (const std::string& module : modules) text << ' ' << module;
    return is_on() ? text.str() : "off";
  }
};

// What --lora-targets may name, and the module of GPT-2 that it is.
inline const std::vector<std::pair<std::string, std::string>> lora_targets = {
    {"qkv", "attn.c_attn"}, {"projection", "attn.c_proj"}, {"up", "mlp.c_fc"}, {"down", "mlp.c_proj"}};

// The name of the layer whose weight this is: "h.0.attn.c_attn" of "h.0.attn.c_attn.weight".
inline std::string module_of(const std::string& tensor) { return tensor.substr(0, tensor.rfind('.')); }

// The tensors that adapters add to a block: of each layer a split one and one that every rank has, whose gradients are
// sums over the ranks. Split ones come first (tensors.h).
inline std::vector<TensorRow> adapter_tensors(const std::vector<TensorRow>& block, const LoraOptions& lora) {
  std::vector<TensorRow> split, summed;
  const size_t rank = size_t(lora.rank);
  for (const TensorRow& weight : block) {
    const std::string module = module_of(weight.name);
    if (weight.shape.size() != 2 || !lora.adapts(module)) continue;
    TensorRow a = {0, module + ".lora_A.weight", {rank, weight.shape[0]}, Initial::uniform, split_by::columns};
    TensorRow b = {0, module + ".lora_B.weight", {weight.shape[1], rank}, Initial::zero, split_by::rows};
    const bool by_columns = weight.split.axis == 1;
    b.split.blocks = weight.split.blocks;
    (by_columns ? a : b).split = split_by::sums;
    split.push_back(by_columns ? b : a);
    summed.push_back(by_columns ? a : b);
  }
  split.insert(split.end(), summed.begin(), summed.end());
  for (size_t i = 0; i < split.size(); ++i) split[i].number = int(i);
  return split;
}

// The adapters of a GPT-2 model.
inline TensorList adapters_of(const TensorList& model, const LoraOptions& lora) {
  return {model, adapter_tensors(block_tensors(size_t(model.shape().channels)), lora)};
}
