// LoRA, low-rank adaptation (Hu et al., arXiv:2106.09685), as PEFT defines it: weight and bias of a linear layer stay as
// they are, and two small matrices beside them, its *adapter*, are trained:
//
//   y = x·W + b + s·(x·Aᵀ)·Bᵀ,   W (inputs, outputs), A (rank, inputs), B (outputs, rank), s = alpha / rank
//
// B starts at zero, so the first loss is the base model's. Adapters have a list of tensors and a parameter store of
// their own (extensions/lora/lora.cuh): ZeRO shards them, and checkpoints hold them, as they do the tensors of any model.
//
// Tensor parallelism splits an adapter as it splits W, and sends nothing more. Where W is split by columns, each rank
// has all of x·Aᵀ, and some rows of B. Where it is split by rows, each rank has some columns of A, so its part of
// x·Aᵀ is one term of a sum; the product with B is linear, and the sum is the one that the layer makes anyway.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gpt/step_options.h"
#include "gpt/tensors.h"

// The names that --lora-targets takes, and the layer of GPT-2 that each of them means.
inline const std::vector<std::pair<std::string, std::string>> lora_targets = {
    {"qkv", "attn.c_attn"}, {"projection", "attn.c_proj"}, {"up", "mlp.c_fc"}, {"down", "mlp.c_proj"}};

// The layer of a weight: "h.0.attn.c_attn" of "h.0.attn.c_attn.weight"
inline std::string module_of(const std::string& weight) { return weight.substr(0, weight.rfind('.')); }

// The tensors that adapters add to a block: of each layer a split one, and one that every rank has and whose gradient is
// the sum over the ranks. The split ones come first (tensors.h), so pair i of n has the numbers i and n + i.
inline std::vector<TensorRow> adapter_tensors(const std::vector<TensorRow>& block, const LoraOptions& lora) {
  std::vector<TensorRow> rows, summed;
  const size_t rank = size_t(lora.rank);
  for (const TensorRow& weight : block) {
    const std::string module = module_of(weight.name);
    if (weight.shape.size() != 2 || std::ranges::count(lora.modules, module) == 0) continue;
    TensorRow a = {int(rows.size()), module + ".lora_A.weight", {rank, weight.shape[0]}, Initial::uniform, split_by::columns};
    TensorRow b = {a.number, module + ".lora_B.weight", {weight.shape[1], rank}, Initial::zero, {0, weight.split.blocks}};
    if (weight.split.axis == 1) std::swap(a, b);
    rows.push_back(a);
    summed.push_back(b);
  }
  for (TensorRow& row : summed) row.number += int(summed.size()), row.split = split_by::sums, rows.push_back(row);
  return rows;
}
