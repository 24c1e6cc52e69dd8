// The inputs of a model's blocks in the host's memory (--offload activations).
#pragma once

#include "extensions/offload/offloaded_inputs.cuh"
#include "gpt/model_room.cuh"

template <class Float>
std::optional<ModelRoom> offload_model(ModelParts<Float>& parts) {
  const StoreOptions& store = parts.options.store;
  if (!store.training || !store.offload.activations) return {};
  const auto inputs = std::make_shared<OffloadedInputs<Float>>(parts.context.stream);
  parts.inputs = inputs.get();
  return ModelRoom{.memory = "activations", .lay_out_on_host = [inputs, &options = parts.options, &on = parts.context](Arena& arena) {
    inputs->lay_out_on_host(arena, on.elements(), options.slots, on.list.most_layers());
  }};
}
