// Matrices in eight bits (FP8: Micikevicius et al., arXiv:2209.05433) for the products of wide blocks, whose tensor
// cores multiply them twice as fast as 16 bits. The design, from here to extensions/fp8/fp8.cuh:
//
//   products the four of a block, forward, input gradient and weight gradient; attention, norms, the first and
//            last blocks, embedding and head stay in bf16, and so does everything that is kept for backward
//   formats  e4m3 for inputs and weights, e5m2 (or e4m3) for gradients
//   scales   one for a matrix, of the matrix as it is now: code = round(x · largest / maximum), x ≈ code · unit with
//            unit = maximum / largest, where largest is 448 (e4m3) or 57,344 (e5m2). So nothing has to be resumed
//   launches the one that writes a tensor raises its maximum (kernels/device/maximum.cuh), one more casts. For a tensor from a
//            library, or from other ranks, a launch of its own finds the maximum. Where a product sums over rows, the
//            cast also writes the transpose, because Hopper's tensor cores take both operands with neighbours along the
//            sum (K-major)
//   weights  are cast once a step, in both orientations (Fp8Weights); activations and gradients before each product,
//            into two matrices that all layers share (Fp8Products, fp8_products.cuh)
//   sums     are in float, multiplied by both units in float, and rounded once to bf16: the same on both devices
//   not finite  a maximum that is NaN or infinite makes its unit the same, and so every element of the product
//
// Matrices are row-major; rows·columns is a multiple of 16, for a transpose each of the two.
//   fp8_maximum          reads sizeof(Float) an element
//   cast_fp8             reads sizeof(Float), writes 1
//   cast_transpose_fp8   reads sizeof(Float), writes 1 for each of the two orientations that is wanted
//   transpose_fp8        reads 1, writes 1: of codes that ranks have gathered
#pragma once

#include <algorithm>

#include "kernels/device/common.cuh"
#include "kernels/gemm/gemm_shape.h"
#include "kernels/device/maximum.cuh"

// Of one matrix, in device memory. cuBLASLt takes units at multiples of 16 bytes alone (fp8_unit_alignment).
struct alignas(fp8_unit_alignment) Fp8Scale {
  float unit;     // the value of one unit of a code: x ≈ code · unit
  float maximum;  // of |x|; zero before it is raised
};

// A matrix that is to be cast: where its codes go, and its scale.
struct Fp8Cast {
  void* codes;  // (rows, columns); null: not wanted
  Fp8Format format;
  Fp8Scale* scale;
};

// Below this a maximum counts as this, so that factors are finite.
constexpr float least_fp8_maximum = 0x1p-100f;

template <__nv_fp8_interpretation_t format>
constexpr float largest_fp8 = format == __NV_E4M3 ? 448.0f : 57344.0f;

// The value that counts as the largest |x|.
__device__ inline float bounded_fp8_maximum(float maximum) {
  return maximum < least_fp8_maximum ? least_fp8_maximum : maximum;  // NaN stays NaN
}

// The factor by which x becomes a code. The grid's first thread writes the unit, for the product.
template <__nv_fp8_interpretation_t format>
__device__ inline float fp8_factor(Fp8Scale* scale) {
  const float maximum = bounded_fp8_maximum(scale->maximum);
  if (blockIdx.x + blockIdx.y + threadIdx.x == 0) scale->unit = maximum / largest_fp8<format>;
  return largest_fp8<format> / maximum;
}

constexpr int fp8_packs = 4;  // that a thread loads before it uses the first

template <class Float, int N>
__global__ void __launch_bounds__(sum_block) fp8_maximum_kernel(Largest<Float> seen, const Float* values, size_t packs) {
  constexpr int round = sum_block * fp8_packs;
  const size_t span = round_up(ceil_div(packs, size_t(gridDim.x)), size_t(round));
  const size_t first = blockIdx.x * span, last = min(first + span, packs);
  for (size_t i = first + threadIdx.x; i < last; i += round) {
    PackWords<Float, N> loaded[fp8_packs] = {};
#pragma unroll
    for (int p = 0; p < fp8_packs; ++p)
      if (i + p * sum_block < last) loaded[p] = load_pack<N>(values + (i + p * sum_block) * N);
#pragma unroll
    for (int p = 0; p < fp8_packs; ++p) {
      float x[N];
      unpack(loaded[p], x);
      seen.see(x);
    }
  }
  seen.raise();
}

template <class Float, __nv_fp8_interpretation_t format, int N>
__global__ void __launch_bounds__(pack_block)
cast_fp8_kernel(uint8_t* codes, Fp8Scale* scale, const Float* values, size_t count) {
  const float factor = fp8_factor<format>(scale);
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float x[N];
  alignas(N) uint32_t words[N / 4];
  load(values + i, x);  // on a GPU two loads, both before x is used
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] *= factor;
  encode_fp8<format>(x, words);
  store_pack(codes + i, reinterpret_cast<const PackWords<uint8_t, N>&>(words));
}

// A block transposes a tile of 128 rows and 64 or 128 columns (`width`) in shared memory; a thread has R rows, 4 or 8, of 8
// columns. The tile lies there as (columns, rows), a row as eight chunks of 16 codes: chunk k of column c has place k ^ (c/8 % 8),
// so that neither writes (eight groups of columns at a time) nor reads (eight chunks) have conflicts of banks.
constexpr int fp8_tile_rows = 128, fp8_tile_columns = 64, fp8_block = 256;

template <int width>
struct Fp8Transposed {
  static constexpr int N = 8, chunk = 16, chunks = fp8_tile_rows / chunk, groups = width / N, R = fp8_tile_rows / (fp8_block / groups);
  alignas(16) uint32_t words[width][chunks][chunk / 4];

  // Where the thread's rows and columns begin in the tile.
  __device__ static int row() { return threadIdx.x / groups * R; }
  __device__ static int column() { return threadIdx.x % groups * N; }

  // The place of chunk k of a column.
  __device__ static int place(int k, int column) { return k ^ (groups > chunks ? column / N % chunks : column / N); }

  // The thread's codes of its column k, the first row's in the lowest byte.
  __device__ void put(int k, const uint32_t (&codes)[R / 4]) {
    uint32_t* const to = &words[column() + k][place(row() / chunk, column())][row() / 4 % (chunk / 4)];
#pragma unroll
    for (int i = 0; i < R / 4; ++i) to[i] = codes[i];
  }

  // Waits until all threads have put theirs. Then the tile of (rows, columns) goes to `transposed`.
  __device__ void store(uint8_t* transposed, int rows, int columns) const {
    const int first_row = blockIdx.y * fp8_tile_rows, first_column = blockIdx.x * width;
    __syncthreads();
#pragma unroll
    for (int part = 0; part < width * chunks; part += fp8_block) {
      const int i = part + threadIdx.x, c = i / chunks, k = i % chunks;
      if (first_column + c >= columns || first_row + k * chunk >= rows) continue;
      store_pack(transposed + size_t(first_column + c) * rows + first_row + k * chunk,
                 *reinterpret_cast<const PackWords<uint8_t, chunk>*>(words[c][place(k, c)]));
    }
  }
};
using Fp8TransposedTile = Fp8Transposed<fp8_tile_columns>;

template <class Float, __nv_fp8_interpretation_t format>
__global__ void __launch_bounds__(fp8_block)
cast_transpose_fp8_kernel(uint8_t* codes, uint8_t* transposed, Fp8Scale* scale, const Float* values, int rows, int columns) {
  constexpr int R = Fp8TransposedTile::R, N = Fp8TransposedTile::N;
  __shared__ Fp8TransposedTile tile;
  const float factor = fp8_factor<format>(scale);
  const int row = blockIdx.y * fp8_tile_rows + tile.row(), column = blockIdx.x * fp8_tile_columns + tile.column();
  if (row < rows && column < columns) {
    PackWords<Float, N> loaded[R];
#pragma unroll
    for (int r = 0; r < R; ++r) loaded[r] = load_pack<N>(values + size_t(row + r) * columns + column);
    float x[R][N];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      unpack(loaded[r], x[r]);
#pragma unroll
      for (int k = 0; k < N; ++k) x[r][k] *= factor;
      if (!codes) continue;
      alignas(N) uint32_t words[N / 4];
      encode_fp8<format>(x[r], words);
      store_pack(codes + size_t(row + r) * columns + column, reinterpret_cast<const PackWords<uint8_t, N>&>(words));
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float y[R] = {x[0][k], x[1][k], x[2][k], x[3][k]};
      uint32_t word[1];
      encode_fp8<format>(y, word);
      tile.put(k, word);
    }
  }
  tile.store(transposed, rows, columns);
}

[[maybe_unused]] static
__global__ void __launch_bounds__(fp8_block)
transpose_fp8_kernel(uint8_t* transposed, const uint8_t* codes, int rows, int columns) {
  constexpr int R = Fp8TransposedTile::R, N = Fp8TransposedTile::N;
  __shared__ Fp8TransposedTile tile;
  const int row = blockIdx.y * fp8_tile_rows + tile.row(), column = blockIdx.x * fp8_tile_columns + tile.column();
  if (row < rows && column < columns) {
    PackWords<uint32_t, N / 4> loaded[R];
#pragma unroll
    for (int r = 0; r < R; ++r) loaded[r] = load_pack<N / 4>(reinterpret_cast<const uint32_t*>(codes + size_t(row + r) * columns + column));
#pragma unroll
    for (int k = 0; k < N; ++k) {
      uint32_t word[1] = {};
#pragma unroll
      for (int r = 0; r < R; ++r) word[0] |= (loaded[r].words[k / 4] >> (k % 4 * 8) & 0xff) << (r * 8);
      tile.put(k, word);
    }
  }
  tile.store(transposed, rows, columns);
}

// Calls function(std::integral_constant<__nv_fp8_interpretation_t, f>) for the format f.
template <class Function>
void with_fp8(Fp8Format format, Function function) {
  if (format == Fp8Format::e4m3) function(std::integral_constant<__nv_fp8_interpretation_t, __NV_E4M3>{});
  else function(std::integral_constant<__nv_fp8_interpretation_t, __NV_E5M2>{});
}

// Says that the range writes codes.
inline void writes_fp8(KernelRange& range, const void* codes, Fp8Format format, size_t count) {
  if (format == Fp8Format::e4m3) range.writes(static_cast<const __nv_fp8_e4m3*>(codes), count);
  else range.writes(static_cast<const __nv_fp8_e5m2*>(codes), count);
}

// Raises *maximum to the largest |values| (count, a multiple of 16): where the launch that wrote them did not.
template <class Float>
void fp8_maximum(float* maximum, const Float* values, size_t count, cudaStream_t stream) {
  KernelRange range("fp8_maximum", stream, {double(count) * sizeof(Float), double(count)}, {{maximum, 1}});
  with_pack<Float>(int(count % pack_width<Float>), [&](auto N) {
    const size_t packs = count / N;
    const size_t blocks = std::clamp(ceil_div(packs, size_t(sum_block * fp8_packs)), size_t(1), size_t(2048));
    fp8_maximum_kernel<Float, N>
        <<<unsigned(blocks), sum_block, 0, stream>>>(Largest<Float>{maximum}, values, packs);
  });
}

// to.codes (count) = values (count, a multiple of 16) in eight bits, by to.scale->maximum; and its unit, which is written
// without any values, too.
template <class Float>
void cast_fp8(const Fp8Cast& to, const Float* values, size_t count, cudaStream_t stream) {
  constexpr int N = 16;
  KernelRange range("cast_fp8", stream, {(sizeof(Float) + 1.0) * count, 2.0 * count});
  writes_fp8(range, to.codes, to.format, count);
  with_fp8(to.format, [&](auto format) {
    cast_fp8_kernel<Float, format, N>
        <<<std::max(pack_blocks(count / N), 1u), pack_block, 0, stream>>>(static_cast<uint8_t*>(to.codes), to.scale, values, count);
  });
}

// The tiles of a matrix that is transposed.
inline dim3 fp8_tiles(int rows, int columns) { return dim3(ceil_div(columns, fp8_tile_columns), ceil_div(rows, fp8_tile_rows)); }

// The same, and transposed (columns, rows). rows, columns: multiples of 16
template <class Float>
void cast_transpose_fp8(const Fp8Cast& to, void* transposed, const Float* values, int rows, int columns, cudaStream_t stream) {
  const size_t count = size_t(rows) * columns;
  KernelRange range("cast_transpose_fp8", stream, {(sizeof(Float) + (to.codes ? 2.0 : 1.0)) * count, 2.0 * count});
  if (to.codes) writes_fp8(range, to.codes, to.format, count);
  writes_fp8(range, transposed, to.format, count);
  with_fp8(to.format, [&](auto format) {
    cast_transpose_fp8_kernel<Float, format><<<fp8_tiles(rows, columns), fp8_block, 0, stream>>>(
        static_cast<uint8_t*>(to.codes), static_cast<uint8_t*>(transposed), to.scale, values, rows, columns);
  });
}

// transposed (columns, rows) = codes (rows, columns). rows, columns: multiples of 16
inline void transpose_fp8(uint8_t* transposed, const uint8_t* codes, Fp8Format format, int rows, int columns, cudaStream_t stream) {
  const size_t count = size_t(rows) * columns;
  KernelRange range("transpose_fp8", stream, {2.0 * count, 0});
  writes_fp8(range, transposed, format, count);
  transpose_fp8_kernel<<<fp8_tiles(rows, columns), fp8_block, 0, stream>>>(transposed, codes, rows, columns);
}
