// The ladder of an operand in eight bits: GELU writes a matrix (rows, columns) in bf16, which stays for backward, and a
// product wants it as codes, with one scale for the matrix: as it is for one gradient, transposed for the other
// (extensions/fp8/kernels/fp8.cuh).
//
//   y = gelu(x),   code = round(y · 448 / max|y|) in e4m3
//
// Least bytes, with one scale: x read, y written, y read once more, because no number can be cast before the largest one
// is known, and both orientations of the codes written: 8 bytes an element. The last rung has a scale for each 128 numbers
// along the sum of a product instead (1×128 tiles: DeepSeek-V3, arXiv:2412.19437, section 3.3.1) where GELU itself casts.
// The model has such scales (--fp8-scale tiles), in a launch of their own: extensions/fp8/kernels/fp8_tiles.cuh. On a GPU
// launches cost time, too: some 2 µs each.
#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "extensions/fp8/kernels/fp8.cuh"
#include "kernels/gelu.cuh"
#include "test/gelu_reference.h"

namespace {

using namespace ladder;

template <class T>
struct Fp8Operand {
  static constexpr const char* name = "fp8_cast";
  static std::vector<Shape> checked_shapes() {
    return {{{"rows", 16}, {"columns", 48}}, {{"rows", 144}, {"columns", 208}}, {{"rows", 128}, {"columns", 256}}};
  }
  static Shape counted_shape() { return {{"rows", 128}, {"columns", 1536}}; }
  static Shape timed_shape() { return {{"rows", 16384}, {"columns", 6400}}; }
  static std::vector<Rung<Fp8Operand>> rungs();

  explicit Fp8Operand(const Shape& shape)
      : rows(multiple_of_16(shape, "rows")), columns(multiple_of_16(shape, "columns")), x(count(), 3), y(count()),
        codes(count()), transposed(count()), scale(1), row_units(count() / tile + 1), column_units(count() / tile + 1) {}

  static int multiple_of_16(const Shape& shape, const std::string& size) {
    return size_that(shape[size] % 16 == 0, shape, size, "a multiple of 16");
  }
  void reset() {
    for (Buffer<uint8_t>* output : {&codes, &transposed}) output->poison();
    y.poison();
    tiled = false;
  }
  size_t count() const { return size_t(rows) * columns; }
  double elements() const { return double(count()); }
  double bytes() const { return elements() * (3 * sizeof(T) + 2); }
  double flops() const { return 13 * elements(); }

  Fp8Cast cast(uint8_t* to) const { return {to, Fp8Format::e4m3, scale.data()}; }
  void clear_scale(cudaStream_t stream) { CUDA_CHECK(cudaMemsetAsync(scale.data(), 0, sizeof(Fp8Scale), stream)); }

  // The decoded numbers, in units of the matrix's largest number: a code is off by 2^-4 of itself, or by half of the
  // smallest one, and y is rounded before.
  std::vector<Output> outputs() const {
    const std::vector<double> numbers = y.numbers();
    double largest = 0;
    for (double number : numbers) largest = std::max(largest, std::abs(number));
    std::vector<double> values, of_transposed, expected = x.numbers();
    for (double& value : expected) value = gelu(value);
    const std::vector<uint8_t> straight = codes.get(), turned = transposed.get();
    const std::vector<double> of_rows = row_units.numbers(), of_columns = column_units.numbers();
    for (size_t i = 0; i < count(); ++i) {
      const size_t other = i % size_t(columns) * size_t(rows) + i / size_t(columns);  // its place in the transpose
      values.push_back(value_of(straight[i]) * (tiled ? of_rows[i / tile] : largest / 448));
      of_transposed.push_back(value_of(turned[other]) * (tiled ? of_columns[other / tile] : largest / 448));
    }
    const double floor = largest / 448 * 0x1p-10 / 0.0625;
    return {{"y", numbers, expected, 1, 1e-6 + rounding<T>}, {"codes", values, numbers, floor, 0.0626},
            {"transposed", of_transposed, numbers, floor, 0.0626}};
  }
  static double value_of(uint8_t code) {
    __nv_fp8_e4m3 number;
    number.__x = code;
    return to_float(number);
  }

  static constexpr int tile = 128;
  int rows, columns;
  bool tiled = false;  // each 128 codes have a unit
  RandomBuffer<T> x;
  Buffer<T> y;
  Buffer<uint8_t> codes, transposed;
  Buffer<Fp8Scale> scale;
  Buffer<float> row_units, column_units;  // (rows, columns/128) and (columns, rows/128)
};

// ---- 1: a launch for each step
//
// GELU, the maximum, the cast, and a transpose of the codes, a thread for each byte: it reads along rows, and so writes
// along columns, each byte into a sector of its own. Five launches with the one that clears the maximum.

__global__ void transpose_bytes_kernel(uint8_t* transposed, const uint8_t* codes, int rows, int columns) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < size_t(rows) * columns) transposed[i % columns * rows + i / columns] = codes[i];
}

template <class T>
void gelu_and_maximum(Fp8Operand<T>& o, cudaStream_t stream) {
  o.clear_scale(stream);
  gelu_forward<T>(o.y, o.x, o.rows, o.columns, stream);
  fp8_maximum<T>(&o.scale.data()->maximum, o.y, o.count(), stream);
}

template <class T>
void step_by_step(Fp8Operand<T>& o, cudaStream_t stream) {
  gelu_and_maximum(o, stream);
  cast_fp8<T>(o.cast(o.codes), o.y, o.count(), stream);
  transpose_bytes_kernel<<<blocks_for(o.count(), 256), 256, 0, stream>>>(o.transposed.data(), o.codes.data(), o.rows, o.columns);
}

// ---- 2: cast and transposed in one launch
//
// A block casts a tile of 128 × 64 and writes it as it is; through shared memory it writes it transposed, 16 bytes a
// thread. The codes are not read again, and all sectors are full. Four launches.

template <class T>
void transposing_cast(Fp8Operand<T>& o, cudaStream_t stream) {
  gelu_and_maximum(o, stream);
  cast_transpose_fp8<T>(o.cast(o.codes), o.transposed, o.y, o.rows, o.columns, stream);
}

// ---- 3: the maximum where the matrix is written, as in the model
//
// GELU's threads have the numbers in registers. A warp finds the largest of its own in one instruction, and where a
// cached copy of the maximum is lower, raises it. y is read once less: three launches, and the least bytes.

template <class T>
void written_maximum(Fp8Operand<T>& o, cudaStream_t stream) {
  if (!std::is_same_v<T, __nv_bfloat16>) return transposing_cast(o, stream);  // GELU takes the maximum in bf16 alone
  o.clear_scale(stream);
  gelu_forward<T>(o.y, o.x, o.rows, o.columns, stream, &o.scale.data()->maximum);
  cast_transpose_fp8<T>(o.cast(o.codes), o.transposed, o.y, o.rows, o.columns, stream);
}

// ---- 4: tiles
//
// A scale for 128 numbers is known as soon as these are: the launch that writes y casts it, too, and y is not read again.
// One launch and 6 bytes an element, and 1/16 for units. Along rows and along columns the tiles are others, and so are the
// codes: a block has 128 × 128 numbers, finds the maxima of its rows in half-warps, and of its columns in shared memory.

__device__ inline float gelu_of(float x) { return x / (1.0f + expf(-2 * gelu_scale * (x + gelu_cubic * x * x * x))); }
__device__ inline float factor_of(float maximum) { return 448 / fmaxf(maximum, least_fp8_maximum); }

template <class T>
__global__ void __launch_bounds__(256) gelu_tiles_kernel(T* y, uint8_t* codes, uint8_t* transposed, float* row_units,
                                                         float* column_units, const T* x, int rows, int columns) {
  constexpr int tile = 128, N = 8, packs = tile / N;
  alignas(16) __shared__ T shared[tile][tile];
  __shared__ float maxima[2][tile];
  const int first_row = blockIdx.y * tile, first_column = blockIdx.x * tile;
  for (int i = threadIdx.x; i < tile * packs; i += blockDim.x) {
    const int row = i / packs, column = i % packs * N;
    const size_t at = size_t(first_row + row) * columns + first_column + column;
    float values[N], maximum = 0;
    load(x + at, values);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = to_float(from_float<T>(gelu_of(values[k])));
#pragma unroll
    for (int k = 0; k < N; ++k) maximum = fmaxf(maximum, fabsf(values[k]));
    for (int offset = packs / 2; offset > 0; offset /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, offset));
    store(y + at, values);
    store(&shared[row][column], values);
    if (column == 0) row_units[at / tile] = 1 / factor_of(maximum);
    alignas(N) uint32_t words[N / 4];
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] *= factor_of(maximum);
    encode_fp8<__NV_E4M3>(values, words);
    store_pack(codes + at, reinterpret_cast<const PackWords<uint8_t, N>&>(words));
  }
  __syncthreads();
  const int column = threadIdx.x % tile, half = threadIdx.x / tile * (tile / 2);  // half of a column's rows
  float maximum = 0;
  for (int row = half; row < half + tile / 2; ++row) maximum = fmaxf(maximum, fabsf(to_float(shared[row][column])));
  maxima[half > 0][column] = maximum;
  __syncthreads();
  const float factor = factor_of(fmaxf(maxima[0][column], maxima[1][column]));
  const size_t to = size_t(first_column + column) * rows + first_row;
  if (half == 0) column_units[to / tile] = 1 / factor;
  for (int row = half; row < half + tile / 2; row += 16) {
    float values[16];
    alignas(16) uint32_t words[4];
    for (int k = 0; k < 16; ++k) values[k] = to_float(shared[row + k][column]) * factor;
    encode_fp8<__NV_E4M3>(values, words);
    store_pack(transposed + to + row, reinterpret_cast<const PackWords<uint8_t, 16>&>(words));
  }
}

template <class T>
bool has_whole_tiles(const Fp8Operand<T>& o) {
  return o.rows % o.tile == 0 && o.columns % o.tile == 0 && sizeof(T) == 2;  // in floats they take too much shared memory
}

template <class T>
void tiles(Fp8Operand<T>& o, cudaStream_t stream) {
  o.tiled = true;
  if constexpr (sizeof(T) == 2)
    gelu_tiles_kernel<T><<<dim3(unsigned(o.columns / o.tile), unsigned(o.rows / o.tile)), 256, 0, stream>>>(
        o.y.data(), o.codes.data(), o.transposed.data(), o.row_units.data(), o.column_units.data(), o.x.data(), o.rows, o.columns);
}

template <class T>
std::vector<Rung<Fp8Operand<T>>> Fp8Operand<T>::rungs() {
  return {
      {"step_by_step", "5 launches: maximum cleared, GELU, maximum, cast, transpose byte by byte", step_by_step<T>},
      {"transposing_cast", "4 launches: one writes the codes in both orientations, through shared memory", transposing_cast<T>},
      {"written_maximum", "3 launches: GELU raises the maximum of what it writes, which is read once less", written_maximum<T>},
      {"tiles", "1 launch: a scale for each 128 numbers, known where they are written (the model has a launch that casts)", tiles<T>,
       has_whole_tiles<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<Fp8Operand>(count, arguments); }
