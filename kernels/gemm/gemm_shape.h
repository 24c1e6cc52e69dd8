// The shape of a matrix product: D (m,n) = alpha · op(A) (m,k) · op(B) (k,n) (kernels/matmul.cuh), and operands in eight
// bits.
#pragma once

#include <compare>
#include <cstddef>

// On GPUs (kernels/gemm/cublaslt.h): the size that NVIDIA recommends for Hopper.
constexpr size_t gpu_gemm_workspace_bytes = 32 << 20;

struct GemmShape {
  int m, n, k;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  bool fast_sums = false;  // of eight bits: tensor cores may keep sums in fewer bits than float
  float alpha = 1;
  auto operator<=>(const GemmShape&) const = default;
};

enum class Fp8Format { e4m3, e5m2 };

// The layout of the units of a matrix (rows, columns) in eight bits; T = ceil(columns / 128) is the number of tiles in
// a row.
enum class Fp8Units {
  one,     // for the whole matrix (extensions/fp8/kernels/fp8.cuh)
  tiles,   // (T, rows): for 128 neighbours in a row (extensions/fp8/kernels/fp8_tiles.cuh)
  blocks,  // (ceil(rows / 128), T rounded up to a multiple of 4): for 128 x 128
};

// cuBLASLt 13.1 takes only units at multiples of 16 bytes; a product with others fails when it runs (so it was on an
// H200), although the heuristic proposes algorithms for it. The launcher checks it on both devices.
constexpr size_t fp8_unit_alignment = 16;

// A matrix in eight bits, in device memory: element = code · its unit.
struct Fp8Matrix {
  const void* codes;
  Fp8Format format;
  const float* unit;  // the first one, at a multiple of fp8_unit_alignment
  Fp8Units units = Fp8Units::one;

  // The unit of an element.
  const float& unit_of(size_t row, size_t column, size_t rows, size_t columns) const {
    const size_t tile = column / 128, tiles = (columns + 127) / 128;
    return unit[units == Fp8Units::one ? 0 : units == Fp8Units::tiles ? tile * rows + row : row / 128 * ((tiles + 3) / 4 * 4) + tile];
  }
};
