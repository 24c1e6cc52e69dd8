// Attention of ranks that share the sequences of a model (--cp).
#pragma once

#include "extensions/context_parallel/context_parallel.cuh"
#include "gpt/model_room.cuh"

template <class Float>
std::optional<ModelRoom> context_parallel_model(ModelParts<Float>& parts) {
  if (parts.mesh.cp().size() == 1) return {};
  const auto attention = std::make_shared<ContextParallel<Float>>(parts.mesh.cp(), parts.options.context_method, parts.context.stream);
  parts.attention = attention.get();
  return ModelRoom{"context parallel", [attention, largest = parts.largest_attention, training = parts.options.store.training](Arena& arena) {
                     attention->lay_out(arena, largest, training);
                   }};
}
