// Attention of ranks that share the sequences of a model (--cp).
#pragma once

#include "extensions/context_parallel/ring_attention.cuh"
#include "extensions/context_parallel/sequence_split.h"
#include "extensions/context_parallel/ulysses.cuh"
#include "gpt/model_room.cuh"

template <class Float>
std::shared_ptr<ContextParallel<Float>> context_parallel_attention(Communicator& ranks, ContextMethod method, cudaStream_t stream) {
  if (method == ContextMethod::ring) return std::make_shared<RingAttention<Float>>(ranks, stream);
  return std::make_shared<Ulysses<Float>>(ranks, stream);
}

template <class Float>
std::optional<ModelRoom> context_parallel_model(ModelParts<Float>& parts) {
  if (parts.mesh.cp().size() == 1) return {};
  const auto attention = context_parallel_attention<Float>(parts.mesh.cp(), options_of<ContextOptions>(parts.options.store.rooms).method, parts.context.stream);
  parts.attention = attention.get();
  return ModelRoom{"context parallel", [attention, largest = parts.largest_attention, training = parts.options.store.training](Arena& arena) {
                     attention->lay_out(arena, largest, training);
                   }};
}
