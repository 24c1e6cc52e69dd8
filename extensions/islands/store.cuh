// Outer steps of a parameter store (--local-steps).
#pragma once

#include "extensions/islands/islands.cuh"
#include "gpt/store_room.cuh"

template <class Float>
void islands_store(StoreParts<Float>& parts) {
  const OuterOptions& o = options_of<OuterOptions>(parts.options.rooms);
  if (parts.options.training && o.is_on())
    parts.between = std::make_unique<OuterOptimizer>(o, parts.shards, parts.mesh, parts.stream);
}
