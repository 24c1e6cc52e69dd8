// A stage's messages to its neighbours, and halves of backward, in a model that is dealt out to several stages.
#pragma once

#include "extensions/pipeline/split_backward.cuh"
#include "extensions/pipeline/stage_links.cuh"
#include "gpt/model_room.cuh"

template <class Float>
std::optional<ModelRoom> pipeline_model(ModelParts<Float>& parts) {
  if (parts.mesh.shape().pp == 1) return {};
  LayerContext<Float>& on = parts.context;
  const auto links = std::make_shared<StageLinks<Float>>(parts.mesh, on);
  const auto later = parts.options.splits_backward ? std::make_shared<SplitWeightGradients<Float>>(on) : nullptr;
  parts.links = links.get();
  if (later) parts.later = later.get();
  return ModelRoom{"stage buffers", [links, later](Arena& arena) {
                     links->lay_out(arena);
                     if (later) later->lay_out(arena);
                   }};
}
