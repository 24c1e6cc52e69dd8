// Matrices in eight bits in a parameter store (--fp8).
#pragma once

#include "extensions/fp8/fp8.cuh"

template <class Float>
void fp8_store(StoreParts<Float>& parts) {
  if constexpr (can_multiply_fp8<Float>)
    if (options_of<Fp8Options>(parts.options.rooms).is_on) parts.gathering = std::make_unique<Fp8Weights<Float>>(parts);
}
