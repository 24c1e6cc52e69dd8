// Elements of tensors of which several ranks have the same copy, for --check-sync (runtime/checks/sync_check.cuh). A
// split tensor is the same on the data-parallel ranks, a piece of a unit on the tensor-parallel ranks, and wte on the
// first and the last stage of a pipeline. Weights are also the same in all islands after an outer step (islands.cuh),
// while moments are each island's own.
#pragma once

#include <algorithm>
#include <string>

#include "gpt/mesh.cuh"
#include "gpt/parameters.h"

class Replicas {
 public:
  Replicas(const Shards& shards, const Mesh& mesh) : shards_(shards), mesh_(mesh.shape()), place_(mesh.place()) {}

  // Visits values of a tensor, if several ranks have the same. values: the first of this rank's piece of the unit, if it
  // is_piece, or of the whole unit.
  template <class E>
  void visit(const Parameters::Visit& visit, const TensorDescriptor& tensor, State state, const std::string& what,
             const E* values, bool is_piece) const {
    const TensorList& list = shards_.list();
    const int data_ranks = shards_.ranks(), data_rank = shards_.rank();
    const bool of_an_island = mesh_.islands > 1 && state != State::weight, of_all = mesh_.islands > 1 && !of_an_island;
    const bool is_split = tensor.split.axis >= 0 && mesh_.tp > 1;
    const bool is_tied = list.is_wte(tensor) && mesh_.pp > 1;
    if (!of_all && !is_tied && (is_split || mesh_.tp == 1) && (is_piece || data_ranks == 1)) return;
    const char* const shards = of_an_island ? "island's shard" : is_split && is_piece ? "part" : is_split ? "tp rank" :
                               is_piece ? "ZeRO piece" : nullptr;
    if (!list.has(tensor)) return visit({tensor, what, shards, Replica::none, nullptr, 0, sizeof(E)});
    const size_t begin = is_piece ? shards_.begin(tensor.unit) : 0;
    const size_t end = begin + (is_piece ? shards_.piece(tensor.unit) : shards_.whole(tensor.unit));
    const size_t first = std::clamp(tensor.offset, begin, end), last = std::clamp(tensor.offset + tensor.local, begin, end);
    const int in_island = (is_split ? place_.tp : 0) * (is_piece ? data_ranks : 1) + (is_piece ? data_rank : 0);
    const int shard = in_island + (of_an_island ? place_.island * mesh_.tp * data_ranks : 0);
    visit({tensor, what, shards, shard, values + (first - begin), last - first, sizeof(E)});
  }

 private:
  const Shards& shards_;
  MeshShape mesh_;
  MeshPlace place_;
};
