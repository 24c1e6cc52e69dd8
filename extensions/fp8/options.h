// What a model and its parameter store are told of products in eight bits.
#pragma once

#include "kernels/gemm/gemm_shape.h"

struct Fp8Options {
  bool is_on = false;
  Fp8Format gradients = Fp8Format::e5m2;
  int kept = 1;        // blocks at each end that stay in bf16
  bool tiles = false;  // a unit for each tile, instead of one for a matrix

  bool has(int layer, int layers) const { return is_on && layer >= kept && layer < layers - kept; }
};
