// Products in eight bits in a model (--fp8).
#pragma once

#include "extensions/fp8/fp8_products.cuh"
#include "gpt/base/error.h"
#include "gpt/model_room.cuh"

template <class Float>
std::optional<ModelRoom> fp8_model(ModelParts<Float>& parts) {
  if (parts.options.store.fp8.tiles && !parts.mesh.is_imagined() && !gemm_has_fp8_tiles())
    fail("--fp8-scale tiles: ", gemm_library(), " does not multiply tiles, as that of CUDA 12.9 does: leave it out");
  // (No other room gathers around fp8's weights.)
  if constexpr (can_multiply_fp8<Float>)
    if (auto* matrices = dynamic_cast<Fp8Weights<Float>*>(&parts.context.store.gathering()); matrices && matrices->is_used()) {
      const auto products = std::make_shared<Fp8Products<Float>>(parts.context, *parts.context.products, *matrices, parts.options);
      parts.context.products = products.get();
      return ModelRoom{"fp8 operands", [products](Arena& arena) { products->lay_out(arena); }};
    }
  return {};
}
