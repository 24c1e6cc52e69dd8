// Which values of the parameters several ranks have: visited for comparisons between them (runtime/training/sync_check.cuh).
#pragma once

#include <algorithm>
#include <string>

#include "parallel/parameters.h"

struct Replicas {
  const Parameters::Visit& visit;
  const Shards& shards;
  int tp_rank, tp_ranks, data_ranks;

  // Visits values of a tensor, if several ranks have the same values. values: the first of this rank's piece of the
  // unit, or of the whole unit. A split tensor is the same on the data-parallel ranks, a piece of a unit on the
  // tensor-parallel ranks, and wte on the first and the last stage of a pipeline.
  template <class E>
  void add(const TensorDescriptor& tensor, const std::string& what, const E* values, bool is_piece) const {
    const TensorList& list = shards.list();
    const bool is_split = tensor.split.axis >= 0 && tp_ranks > 1;
    const bool is_pipeline = !list.is_first_stage() || !list.is_last_stage();
    const bool is_tied = tensor.unit == 0 && &tensor == list.tensors_of(0) && is_pipeline;
    if (!is_tied && (is_split || tp_ranks == 1) && (is_piece || data_ranks == 1)) return;
    const char* const numbers = is_split && is_piece ? "part" : is_split ? "tp rank" : is_piece ? "ZeRO piece" : nullptr;
    if (!list.has(tensor)) return visit({tensor, what, numbers, Replica::none, nullptr, 0, sizeof(E)});
    const size_t begin = is_piece ? shards.begin(tensor.unit) : 0;
    const size_t end = begin + (is_piece ? shards.piece(tensor.unit) : shards.whole(tensor.unit));
    const size_t first = std::clamp(tensor.offset, begin, end), last = std::clamp(tensor.offset + tensor.local, begin, end);
    const int shard = (is_split ? tp_rank : 0) * (is_piece ? data_ranks : 1) + (is_piece ? shards.rank() : 0);
    visit({tensor, what, numbers, shard, values + (first - begin), last - first, sizeof(E)});
  }
};
