// What tensor-parallel ranks put together in a parameter store: gradients that each has in part, those of the LayerNorms, which they
// have computed from their own rows; and blocks of a checkpoint.
// Its events are tested by test_tensor_parallel, test_meshes.
#pragma once

#include <algorithm>
#include <vector>

#include "extensions/tensor_parallel/gathered_blocks.cuh"
#include "gpt/store_room.cuh"

class SumsOverRows final : public SumsBeside {
 public:
  SumsOverRows(Communicator& tp, const Shards& shards, const Kept& kept) : tp_(tp), shards_(shards), kept_(kept) {}

  // Those of all units in one operation.
  void complete(const Gradients& gradients, cudaStream_t stream) override {
    std::vector<Summed> arrays;
    for (int unit = 0; unit < shards_.units(); ++unit) {
      const Unit& whole = shards_.list().units()[size_t(unit)];
      const size_t begin = std::max(kept_.begin(unit), whole.summed);
      const size_t end = std::min(kept_.begin(unit) + kept_.count(unit), whole.count);
      if (begin < end) arrays.emplace_back(gradients(unit) + (begin - kept_.begin(unit)), end - begin);
    }
    tp_.after(stream);
    tp_.all_reduce(arrays);
    tp_.wait_for_all(stream);
  }

 private:
  Communicator& tp_;
  const Shards& shards_;
  const Kept& kept_;
};

template <class Float>
void tensor_parallel_store(StoreParts<Float>& parts) {
  Communicator& tp = parts.mesh.tp();
  if (tp.size() == 1) return;
  parts.sums_beside.push_back(std::make_unique<SumsOverRows>(tp, parts.shards, parts.kept));
  const size_t most = most_gathered(parts.shards, parts.reduction->has_errors());
  if (parts.options.training && most > 0) parts.checkpoint_blocks = std::make_unique<GatheredBlocks>(tp, most);
}
