// Blocks of a checkpoint that tensor-parallel ranks gather, because each of them has many short runs of it (blocks.h).
// Its events are tested by test_tp_checkpoint.
#pragma once

#include <algorithm>
#include <vector>

#include "gpt/checkpoint_block_gathering.cuh"
#include "gpt/collectives.cuh"

class GatheredBlocks final : public CheckpointBlockGathering {
 public:
  // most: elements of all ranks in the largest round
  GatheredBlocks(Communicator& tp, size_t most) : tp_(tp), most_(most) {}

  void add_to(DeviceMemory& memory) override {
    memory.add("checkpoint buffer", [this](Arena& arena) { gathered_ = arena.take<float>(most_); });
  }
  void gather(const CheckpointBlock& block, const float* own, float* to, cudaStream_t stream) override { gather_as(block, own, to, stream); }
  void gather(const CheckpointBlock& block, const __nv_bfloat16* own, float* to, cudaStream_t stream) override { gather_as(block, own, to, stream); }
  void gather(const CheckpointBlock& block, const __half* own, float* to, cudaStream_t stream) override { gather_as(block, own, to, stream); }

 private:
  // own: this rank's runs of all stripes of the round, `share` elements for each rank's block
  template <class E>
  void gather_as(const CheckpointBlock& block, const E* own, float* to, cudaStream_t stream) {
    const Part& part = block.tensor->part;
    const size_t ranks = size_t(tp_.size()), round = block.count, share = round / ranks;
    E* const all = reinterpret_cast<E*>(gathered_);
    E* const here = all + size_t(tp_.rank()) * round;  // collectives need device memory, and offloaded arrays are not in it
    CUDA_CHECK(cudaMemcpyAsync(here, own, round * sizeof(E), cudaMemcpyDefault, stream));
    tp_.after(stream);
    tp_.all_gather(all, here, round);
    tp_.wait_for_all(stream);
    std::vector<E> runs(share);
    for (size_t rank = 0; rank < ranks; ++rank) {
      copy_and_wait(runs.data(), all + rank * round + size_t(tp_.rank()) * share, share, cudaMemcpyDeviceToHost, stream);
      const Part in_block = {part.width, part.stride, rank * part.width};
      for (size_t i = 0; i < share; i += part.width)
        std::transform(&runs[i], &runs[i] + part.width, to + in_block.in_whole(i), [](E x) { return to_float(x); });
    }
  }

  Communicator& tp_;
  size_t most_;
  float* gathered_ = nullptr;  // a round of blocks, from all ranks
};
