// Matrices in eight bits with a unit for each tile (--fp8-scale tiles; DeepSeek-V3, arXiv:2412.19437, section 3.3.1), where
// extensions/fp8/kernels/fp8.cuh has one for the matrix. A number that is far larger than all others then costs its tile precision, and
// not the matrix.
//
//   tiles    of activations and gradients: 128 neighbours along the sum of a product (Fp8Units::tiles)
//   blocks   of weights: 128 x 128, so both orientations have the same codes (Fp8Units::blocks)
//
// A CUDA block that has loaded 128 x 128 numbers knows all their maxima, so one launch casts, and none looks for a
// maximum. Along rows and along columns tiles are others, and so are their codes. Products by cuBLASLt: on Hopper alone,
// from CUDA 12.9 on.
//
//   cast_tiles_fp8   reads sizeof(Float) an element, writes 1 for each orientation that is wanted, and units of 4 bytes
// Its barriers are tested by test_fp8.
#pragma once

#include <stdexcept>

#include "extensions/fp8/kernels/fp8.cuh"
#include "gpt/base/error.h"

constexpr int fp8_tile = 128;

// How many units a matrix (rows, columns) has.
inline size_t fp8_tile_units(int rows, int columns) { return size_t(rows) * ceil_div(columns, fp8_tile); }
inline size_t fp8_block_units(int rows, int columns) {
  return size_t(ceil_div(rows, fp8_tile)) * round_up(ceil_div(columns, fp8_tile), 4);
}

// Where the codes of a matrix and its units go; no codes: they are not wanted.
struct Fp8TileCast {
  uint8_t* codes = nullptr;
  float* units = nullptr;
};

// The largest |x| of bits of |x|, over the lanes whose numbers differ in less than `lanes`.
template <int lanes>
__device__ inline uint32_t largest_of_lanes(uint32_t bits) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, offset));
  return bits;
}

// A thread has 8 rows of 8 columns: a row lies in half a warp, a column in two lanes of each warp. The transposed codes
// pass through shared memory, as in cast_transpose_fp8_kernel.
template <class Float, __nv_fp8_interpretation_t format, bool has_blocks>
__global__ void __launch_bounds__(fp8_block)
cast_tiles_fp8_kernel(Fp8TileCast straight, Fp8TileCast transposed, const Float* values, int rows, int columns) {
  using Tile = Fp8Transposed<fp8_tile>;
  constexpr int N = Tile::N, groups = Tile::groups, warps = fp8_block / 32;
  static_assert(fp8_tile == fp8_tile_rows && Tile::R == N);
  __shared__ Tile tile;
  __shared__ uint32_t maxima[warps][N][groups];  // of columns
  const int group = threadIdx.x % groups, eight = threadIdx.x / groups;
  const int row = blockIdx.y * fp8_tile + tile.row(), column = blockIdx.x * fp8_tile + tile.column();
  const bool is_inside = row < rows && column < columns;
  float x[N][N] = {};
  if (is_inside) {
    PackWords<Float, N> loaded[N];
#pragma unroll
    for (int r = 0; r < N; ++r) loaded[r] = load_pack<N>(values + size_t(row + r) * columns + column);
#pragma unroll
    for (int r = 0; r < N; ++r) unpack(loaded[r], x[r]);
  }

  uint32_t of_row[N] = {}, of_column[N] = {};
#pragma unroll
  for (int r = 0; r < N; ++r) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t bits = __float_as_uint(x[r][k]) & 0x7fffffffu;
      of_row[r] = max(of_row[r], bits);
      of_column[k] = max(of_column[k], bits);
    }
    of_row[r] = largest_of_lanes<groups>(of_row[r]);
  }
  if (has_blocks || transposed.codes) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      of_column[k] = max(of_column[k], __shfl_xor_sync(0xffffffffu, of_column[k], 16));
      if (eight % 2 == 0) maxima[threadIdx.x / 32][k][group] = of_column[k];  // both lanes of a column have it
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; ++k)
      for (int warp = 0; warp < warps; ++warp) of_column[k] = max(of_column[k], maxima[warp][k][group]);
  }
  if (has_blocks) {
    uint32_t of_block = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) of_block = max(of_block, of_column[k]);
    of_block = largest_of_lanes<groups>(of_block);
#pragma unroll
    for (int k = 0; k < N; ++k) of_row[k] = of_column[k] = of_block;
  }

  if (straight.codes && is_inside) {
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const float maximum = bounded_fp8_maximum(__uint_as_float(of_row[r])), factor = largest_fp8<format> / maximum;
      float y[N];
      alignas(N) uint32_t words[N / 4];
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = x[r][k] * factor;
      encode_fp8<format>(y, words);
      store_pack(straight.codes + size_t(row + r) * columns + column, reinterpret_cast<const PackWords<uint8_t, N>&>(words));
      if (!has_blocks && group == 0) straight.units[size_t(blockIdx.x) * rows + row + r] = maximum / largest_fp8<format>;
    }
  }
  if (has_blocks && threadIdx.x == 0) {
    const float unit = bounded_fp8_maximum(__uint_as_float(of_row[0])) / largest_fp8<format>;
    straight.units[blockIdx.y * round_up(gridDim.x, 4u) + blockIdx.x] = unit;
    transposed.units[blockIdx.x * round_up(gridDim.y, 4u) + blockIdx.y] = unit;
  }
  if (!transposed.codes) return;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float maximum = bounded_fp8_maximum(__uint_as_float(of_column[k])), factor = largest_fp8<format> / maximum;
    float y[N];
    uint32_t words[N / 4];
#pragma unroll
    for (int r = 0; r < N; ++r) y[r] = x[r][k] * factor;
    encode_fp8<format>(y, words);
    tile.put(k, words);
    if (!has_blocks && eight == 0 && is_inside)
      transposed.units[size_t(blockIdx.y) * columns + column + k] = maximum / largest_fp8<format>;
  }
  tile.store(transposed.codes, rows, columns);
}

// straight = values (rows, columns) in eight bits, transposed (columns, rows) the same transposed; each with units of its
// own. rows, columns: multiples of 16. units: tiles, or blocks, for which both orientations are wanted
template <class Float>
void cast_tiles_fp8(const Fp8TileCast& straight, const Fp8TileCast& transposed, Fp8Format format, Fp8Units units,
                    const Float* values, int rows, int columns, cudaStream_t stream) {
  if (rows % 16 != 0 || columns % 16 != 0)
    throw std::logic_error(concat("cast_tiles_fp8: ", rows, " rows or ", columns, " columns are no multiple of 16"));
  const size_t count = size_t(rows) * columns;
  const double written = (straight.codes ? 1.0 : 0.0) + (transposed.codes ? 1.0 : 0.0);
  KernelRange range("cast_tiles_fp8", stream, {(sizeof(Float) + written * (1 + 4.0 / fp8_tile)) * count, 3.0 * count});
  for (const Fp8TileCast* cast : {&straight, &transposed})
    if (cast->codes) writes_fp8(range, cast->codes, format, count);
  with_fp8(format, [&](auto format) {
    const dim3 grid(ceil_div(columns, fp8_tile), ceil_div(rows, fp8_tile));
    const auto kernel = units == Fp8Units::blocks ? cast_tiles_fp8_kernel<Float, format, true> : cast_tiles_fp8_kernel<Float, format, false>;
    kernel<<<grid, fp8_block, 0, stream>>>(straight, transposed, values, rows, columns);
  });
}
