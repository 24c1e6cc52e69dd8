// The errors of compressed messages in checkpoints: which copies of them there are, what a rank writes, and what it reads.
#pragma once

#include <filesystem>
#include <span>
#include <vector>

#include "gpt/parameters.h"

// The errors of compressed messages (compressed_reduction.cuh) are each rank's own. Of a tensor there are as many *copies* as
// ranks add to an element of its gradient: the data-parallel ranks (between hosts only: one of each host); of a tensor whose
// gradient is summed over tensor-parallel ranks, each of these; of wte in a pipeline, both ends. Only the sum of all
// copies counts: on another mesh it is dealt anew. Tensor-parallel ranks have the same errors of a whole tensor, one copy.
struct Copies {
  int own, all;  // the number of this rank's copy, and how many there are
};
inline Copies ends_of(const TensorDescriptor& tensor, const TensorList& list) {
  const bool has_two = list.is_wte(tensor) && !(list.is_first_stage() && list.is_last_stage());
  return {has_two && !list.is_first_stage(), has_two ? 2 : 1};
}
inline Copies copies_of(const TensorDescriptor& tensor, const Shards& shards) {
  const TensorList& list = shards.list();
  const auto [end, ends] = ends_of(tensor, list);
  const int senders = shards.ranks() / shards.inside();
  const int tp = tensor.split.summed ? list.tp() : 1, tp_rank = tensor.split.summed ? list.tp_rank() : 0;
  return {(end * senders + shards.rank() / shards.inside()) * tp + tp_rank, ends * senders * tp};
}

// Factors (low_rank.cuh) are the same on all data-parallel ranks: a copy for each tensor-parallel rank, and of wte's for both
// ends. With another number of copies they stay as drawn.
inline Copies copies_of_factor(const TensorDescriptor& factor, const TensorList& list) {
  const auto [end, ends] = ends_of(factor, list);
  return {end * list.tp() + list.tp_rank(), ends * list.tp()};
}
inline std::vector<CheckpointBlock> written_factors(std::span<const TensorDescriptor> factors, const Shards& shards) {
  std::vector<CheckpointBlock> blocks;
  for (const TensorDescriptor& factor : factors)
    if (factor.local > 0 && shards.rank() == 0)
      blocks.push_back({&factor, 0, factor.local, false, copies_of_factor(factor, shards.list()).own, State::factor});
  return blocks;
}

// The blocks of errors that this rank writes to a checkpoint: all ranks' together hold each element of each copy.
inline std::vector<CheckpointBlock> written_errors(const Shards& shards, size_t most) {
  std::vector<CheckpointBlock> blocks;
  for (CheckpointBlock block : blocks_of(error_slices(shards), shards.list(), most)) {
    if (block.tensor->is_whole() && shards.list().tp_rank() > 0) continue;
    block.copy = copies_of(*block.tensor, shards).own;
    blocks.push_back(block);
  }
  return blocks;
}

// Loads this rank's errors: its own copy, if there are as many as on the mesh that wrote them, otherwise an equal part of
// their sum; zeros if that mesh had none, because one data-parallel rank sends nothing. Factors stay as they are, if the
// mesh that wrote them had another number of copies.
void load_errors(const std::filesystem::path& folder, Parameters& parameters, size_t most = most_at_once);
