// Products in eight bits in a model (--fp8).
#pragma once

#include "extensions/fp8/fp8_products.cuh"
#include "gpt/base/error.h"
#include "gpt/model_room.cuh"

inline void refuse_other_devices(const Fp8Options& o) {
  if (o.is_on && !has_fp8())
    usage_error("--fp8: this GPU has no products in eight bits, which begin with compute capability 8.9; leave it out");
  if (o.tiles && !has_fp8_tiles())
    usage_error("--fp8-scale tiles: Hopper (compute capability 9.0) alone multiplies tiles; leave it out");
}

template <class Float>
std::optional<ModelRoom> fp8_model(ModelParts<Float>& parts) {
  const auto& o = options_of<Fp8Options>(parts.options.store.rooms);
  if (!parts.options.elsewhere) refuse_other_devices(o);
  if (o.tiles && !parts.mesh.is_imagined() && !gemm_has_fp8_tiles())
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
