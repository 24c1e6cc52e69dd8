// How a room takes part in a parameter store: in the messages to other ranks, in the places of gradients and of the optimizer's
// state, and between updates. A folder of extensions/ or runtime/ with a file store.cuh has a function template in it, called
// NAME_store, which is given the parts of each store before it takes memory. If the options ask for the room, it puts its own in the
// place of a part, around the one that is there, or adds it; dev/make/rooms.sh writes the list. The functions are called in the order
// of the rooms' names: compression, then fp8, then offload, which asks whether weights are rounded; pipeline, then tensor_parallel.
#pragma once

#include <memory>
#include <type_traits>
#include <vector>

#include "gpt/between_updates.cuh"
#include "gpt/checkpoint_block_gathering.cuh"
#include "gpt/gradient_home.cuh"
#include "gpt/gradient_reduction.cuh"
#include "gpt/mesh.cuh"
#include "gpt/optimizer_state.cuh"
#include "gpt/weight_gathering.cuh"

template <class Float>
struct StoreParts {
  // These live as long as the store.
  const StoreOptions& options;
  const Shards& shards;
  const Kept& kept;
  int zero;  // ZeRO's level
  Mesh& mesh;
  cudaStream_t stream;  // the model's

  std::unique_ptr<WeightGathering<Float>> gathering = std::make_unique<WeightGathering<Float>>(shards, mesh.data());
  std::unique_ptr<GradientReduction<Float>> reduction = std::make_unique<GradientReduction<Float>>(shards, zero, mesh.data(), options);
  std::vector<std::unique_ptr<SumsBeside>> sums_beside = {};
  std::unique_ptr<GradientHome> gradients = std::make_unique<GradientHome>(shards, kept, zero);
  std::unique_ptr<OptimizerState<Float>> optimizer = {};  // null: the plain one, which is made when the others are known
  std::unique_ptr<BetweenUpdates> between = std::make_unique<BetweenUpdates>();
  std::unique_ptr<CheckpointBlockGathering> checkpoint_blocks = std::make_unique<CheckpointBlockGathering>();

  // Are there masters? In fp32 the kept weights are exact, unless gathered weights, which are rounded, take their place.
  bool needs_masters() const {
    if constexpr (std::is_same_v<Float, float>) return options.training && gathering->rounds() && zero < 3;
    else return options.training && !options.stochastic_rounding;
  }
};
