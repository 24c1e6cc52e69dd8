// Adapters in a model (--lora-rank): they are trained in the place of its weights.
#pragma once

#include "extensions/lora/lora.cuh"
#include "gpt/model_room.cuh"

template <class Float>
std::optional<ModelRoom> lora_model(ModelParts<Float>& parts) {
  if (!parts.options.lora.is_on()) return {};
  const auto adapters = std::make_shared<Adapters<Float>>(parts);
  parts.context.products = adapters.get();
  parts.context.trained = &adapters->store();
  return ModelRoom{.memory = "adapter operands",
                   .lay_out = [adapters](Arena& arena) { adapters->lay_out(arena); },
                   .clear = [adapters] { adapters->store().clear(); },
                   .merge = [adapters, &model = parts.context.store] { adapters->merge_into(model); }};
}
