// What a parameter store keeps in the host's memory (--offload optimizer, gradients).
#pragma once

#include "extensions/offload/offloaded_gradients.cuh"
#include "extensions/offload/offloaded_optimizer.cuh"
#include "gpt/store_room.cuh"

template <class Float>
void offload_store(StoreParts<Float>& parts) {
  const StoreOptions& o = parts.options;
  if (!o.training) return;
  if (o.offload.gradients) parts.gradients = std::make_unique<OffloadedGradients>(parts.shards, parts.kept, parts.zero);
  if (o.offload.optimizer)
    parts.optimizer = std::make_unique<OffloadedOptimizer<Float>>(parts.shards, parts.kept, parts.needs_masters(), o);
}
