// What a parameter store sends, compressed (--compress, --compress-weights).
#pragma once

#include "extensions/compression/compressed_gathering.cuh"
#include "extensions/compression/compressed_reduction.cuh"

template <class Float>
void compression_store(StoreParts<Float>& parts) {
  const StoreOptions& o = parts.options;
  if (o.compress_weights && parts.zero > 0) parts.gathering = std::make_unique<CompressedGathering<Float>>(parts.shards, parts.mesh);
  if (o.training && parts.mesh.data().size() > 1 && (o.compressed_bits > 0 || o.low_rank > 0))
    parts.reduction = std::make_unique<CompressedReduction<Float>>(parts);
}
