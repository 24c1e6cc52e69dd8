// What a parameter store sends, compressed (--compress, --compress-weights).
#pragma once

#include "extensions/compression/compressed_gathering.cuh"
#include "extensions/compression/compressed_reduction.cuh"

template <class Float>
void compression_store(StoreParts<Float>& parts) {
  const auto& o = options_of<CompressionOptions>(parts.options.rooms);
  if (o.weights && parts.zero > 0) parts.gathering = std::make_unique<CompressedGathering<Float>>(parts.shards, parts.mesh);
  if (parts.options.training && parts.mesh.data().size() > 1 && (o.bits > 0 || o.low_rank > 0))
    parts.reduction = std::make_unique<CompressedReduction<Float>>(parts, o);
}
