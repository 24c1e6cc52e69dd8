// Blocks of a checkpoint that tensor-parallel ranks gather, because each of them has many short runs of it (blocks.h).
// Its events are tested by test_tp_checkpoint.
#pragma once

#include <algorithm>
#include <vector>

#include "gpt/collectives.cuh"
#include "kernels/device/part.h"

// One round: a block for each rank. own: this rank's runs of all stripes of the round, `share` elements for each rank's
// block. all: device memory for the runs of all ranks. to: this rank's block. Waits for the device.
template <class E>
void gather_block(Communicator& tp, E* all, const E* own, const Part& part, size_t share, float* to, cudaStream_t stream) {
  const size_t ranks = size_t(tp.size()), round = ranks * share;
  E* const here = all + size_t(tp.rank()) * round;  // collectives need device memory, and offloaded arrays are not in it
  CUDA_CHECK(cudaMemcpyAsync(here, own, round * sizeof(E), cudaMemcpyDefault, stream));
  tp.after(stream);
  tp.all_gather(all, here, round);
  tp.wait_for_all(stream);
  std::vector<E> runs(share);
  for (size_t rank = 0; rank < ranks; ++rank) {
    copy_and_wait(runs.data(), all + rank * round + size_t(tp.rank()) * share, share, cudaMemcpyDeviceToHost, stream);
    const Part in_block = {part.width, part.stride, rank * part.width};
    for (size_t i = 0; i < share; i += part.width)
      std::transform(&runs[i], &runs[i] + part.width, to + in_block.in_whole(i), [](E x) { return to_float(x); });
  }
}
