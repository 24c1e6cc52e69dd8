// How a room takes part in what a parameter store sends to other ranks. A folder of extensions/ or runtime/ with a file store.cuh
// has a function template in it, called NAME_store, which is given the parts of each store before it takes memory. If the options
// ask for the room, it puts its own in the place of a part, around the one that is there, or adds it; dev/make/rooms.sh writes the
// list. The functions are called in the order of the rooms' names: compression, then fp8; pipeline, then tensor_parallel.
#pragma once

#include <memory>
#include <vector>

#include "gpt/gradient_reduction.cuh"
#include "gpt/mesh.cuh"
#include "gpt/weight_gathering.cuh"

template <class Float>
struct StoreParts {
  // These live as long as the store.
  const StoreOptions& options;
  const Shards& shards;
  const Kept& kept;
  int zero;  // the ZeRO stage
  Mesh& mesh;

  std::unique_ptr<WeightGathering<Float>> gathering;
  std::unique_ptr<GradientReduction<Float>> reduction;
  std::vector<std::unique_ptr<SumsBeside>> sums_beside = {};
};
