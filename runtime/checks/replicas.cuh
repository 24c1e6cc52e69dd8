// Elements of tensors of which several ranks have the same copy, for --check-sync (runtime/checks/sync_check.cuh). A
// split tensor is the same on the data-parallel ranks, a piece of a unit on the tensor-parallel ranks, and wte on the
// first and the last stage of a pipeline. Weights are also the same in all islands after an outer step (islands.cuh),
// while moments are each island's own.
#pragma once

#include <algorithm>
#include <functional>
#include <string>

#include "gpt/mesh.cuh"
#include "gpt/parameters.h"

// Values that several ranks must have, bit by bit: all ranks, or all those with the same number of shard.
struct Replica {
  const TensorDescriptor& tensor;
  std::string what;     // "weights", "masters", ...
  const char* shards;   // what the numbers count: "tp rank", "ZeRO piece" or "part"; null: all ranks have the same
  static constexpr int none = -1;
  int shard;            // 0 if there are no shards; none: the tensor is another pipeline stage's
  const void* values;   // in device memory
  size_t count, bytes;  // number of elements (a piece may have none), and bytes of each
};

// Visits everything that several ranks have, and what only other stages have, in the same order on all ranks.
// Collective.
inline void visit_replicas(Parameters& parameters, const Mesh& mesh, const std::function<void(const Replica&)>& visit) {
  const Shards& all = parameters.shards();
  const TensorList& list = all.list();
  const MeshShape shape = mesh.shape();
  const MeshPlace place = mesh.place();
  parameters.visit_values([&](const TensorValues& v) {
    const TensorDescriptor& tensor = v.tensor;
    const int data_ranks = all.ranks();
    const bool of_an_island = shape.islands > 1 && v.state != State::weight, of_all = shape.islands > 1 && !of_an_island;
    const bool is_split = tensor.split.axis >= 0 && shape.tp > 1;
    const bool is_tied = list.is_wte(tensor) && shape.pp > 1;
    if (!of_all && !is_tied && (is_split || shape.tp == 1) && (v.is_piece || data_ranks == 1)) return;
    const char* const shards = of_an_island ? "island's shard" : is_split && v.is_piece ? "part" : is_split ? "tp rank" :
                               v.is_piece ? "ZeRO piece" : nullptr;
    if (!list.has(tensor)) return visit({tensor, v.what, shards, Replica::none, nullptr, 0, v.bytes});
    const size_t begin = v.is_piece ? all.begin(tensor.unit) : 0;
    const size_t end = begin + (v.is_piece ? all.piece(tensor.unit) : all.whole(tensor.unit));
    const size_t first = std::clamp(tensor.offset, begin, end), last = std::clamp(tensor.offset + tensor.local, begin, end);
    const int in_island = (is_split ? place.tp : 0) * (v.is_piece ? data_ranks : 1) + (v.is_piece ? all.rank() : 0);
    const int shard = in_island + (of_an_island ? place.island * shape.tp * data_ranks : 0);
    const char* const values = static_cast<const char*>(v.of_unit) + (first - begin) * v.bytes;
    visit({tensor, v.what, shards, shard, values, last - first, v.bytes});
  });
}
