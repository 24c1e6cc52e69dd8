// Gradients that ranks beside the data-parallel ones have in part: their sums. kept: what a rank keeps of gradients; the
// stream waits for the sums over tp, not for those over the ends.
// Its events are tested by test_tensor_parallel, test_meshes.
#pragma once

#include <algorithm>
#include <vector>

#include "gpt/collectives.cuh"
#include "gpt/shards.h"

// Tensor-parallel ranks have computed the gradients of the LayerNorms from their own rows: adds them up, those of all
// units in one operation. gradient(unit): the first of those that are kept
template <class Gradient>
void add_up_over_tp(Communicator& tp, const Shards& shards, const Kept& kept, Gradient gradient, cudaStream_t stream) {
  if (tp.size() == 1) return;
  std::vector<Summed> arrays;
  for (int unit = 0; unit < shards.units(); ++unit) {
    const Unit& whole = shards.list().units()[size_t(unit)];
    const size_t begin = std::max(kept.begin(unit), whole.summed);
    const size_t end = std::min(kept.begin(unit) + kept.count(unit), whole.count);
    if (begin < end) arrays.emplace_back(gradient(unit) + (begin - kept.begin(unit)), end - begin);
  }
  tp.after(stream);
  tp.all_reduce(arrays);
  tp.wait_for_all(stream);
}

// The pipeline's first stage has the embedding's part of wte's gradient, the last stage has the head's part. Both get
// the sum, and so make the same update. (The last stage needs no wpe.) Runs behind the sums of the data group, on the
// same stream. gradient: the first of those that are kept of the embedding
inline void add_up_over_ends(Communicator& ends, const Shards& shards, const Kept& kept, float* gradient, cudaStream_t stream) {
  const size_t begin = kept.begin(0), end = std::min(begin + kept.count(0), shards.list().tensors_of(0)[wpe].offset);
  ends.after(stream);
  if (begin < end) ends.all_reduce(gradient, end - begin);
}
