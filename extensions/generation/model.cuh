// Attention of a model that writes texts and keeps the keys and values of their tokens.
#pragma once

#include "extensions/generation/text_cache.cuh"
#include "gpt/model_room.cuh"

template <class Float>
std::optional<ModelRoom> generation_model(ModelParts<Float>& parts) {
  const ModelOptions& o = parts.options;
  if (o.cached_positions == 0) return {};
  const ContextMethod method = options_of<ContextOptions>(o.store.rooms).method;
  const auto texts = std::make_shared<TextCache<Float>>(*parts.attention, parts.mesh.cp(), method, parts.context.stream);
  parts.attention = texts.get();
  const auto& chunks = parts.context.list.chunks();
  return ModelRoom{"kv cache", [texts, &chunks, &o, largest = parts.largest_attention](Arena& arena) {
                     texts->lay_out(arena, chunks, o.samples, o.cached_positions, largest.heads, largest.head_size);
                   }};
}
