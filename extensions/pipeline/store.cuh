// The pipeline's first stage has the embedding's part of wte's gradient, the last stage has the head's part. Both get
// the sum, and so make the same update. (The last stage needs no wpe.)
// Its events are tested by test_meshes.
#pragma once

#include <algorithm>

#include "gpt/store_room.cuh"

class SumsOverEnds final : public SumsBeside {
 public:
  SumsOverEnds(Communicator& ends, const Shards& shards, const Kept& kept) : ends_(ends), shards_(shards), kept_(kept) {}

  // Runs behind the sums of the data group, on the same stream.
  void begin(const Gradients& gradients, cudaStream_t stream) override {
    const size_t begin = kept_.begin(0), end = std::min(begin + kept_.count(0), shards_.list().tensors_of(0)[wpe].offset);
    ends_.after(stream);
    if (begin < end) ends_.all_reduce(gradients(0), end - begin);
  }
  void complete(const Gradients&, cudaStream_t stream) override {
    ends_.wait_for_all(stream);
  }

 private:
  Communicator& ends_;
  const Shards& shards_;
  const Kept& kept_;
};

template <class Float>
void pipeline_store(StoreParts<Float>& parts) {
  Communicator& ends = parts.mesh.ends();
  if (ends.size() > 1) parts.sums_beside.push_back(std::make_unique<SumsOverEnds>(ends, parts.shards, parts.kept));
}
