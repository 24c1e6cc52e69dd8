// The ladder of an operand in eight bits: GELU writes a matrix (rows, columns) in bf16, which stays for backward, and a
// product wants it as codes, with one scale for the matrix: as it is for one gradient, transposed for the other
// (kernels/fp8.cuh).
//
//   y = gelu(x),   code = round(y · 448 / max|y|) in e4m3
//
// Least bytes: x read, y written, y read once more, because no number can be cast before the largest one is known, and
// both orientations of the codes written: 8 bytes an element. (A scale for each tile of 128 would need no second pass:
// 6.) What a GPU pays besides is launches: some 2 µs each.
#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/fp8.cuh"
#include "kernels/gelu.cuh"
#include "test/gelu_reference.h"

namespace {

using namespace ladder;

template <class T>
struct Fp8Operand {
  static constexpr const char* name = "fp8_cast";
  static std::vector<Shape> checked_shapes() {
    return {{{"rows", 16}, {"columns", 48}}, {{"rows", 144}, {"columns", 208}}};
  }
  static Shape counted_shape() { return {{"rows", 128}, {"columns", 1536}}; }
  static Shape timed_shape() { return {{"rows", 16384}, {"columns", 6400}}; }
  static std::vector<Rung<Fp8Operand>> rungs();

  explicit Fp8Operand(const Shape& shape)
      : rows(multiple_of_16(shape, "rows")), columns(multiple_of_16(shape, "columns")), x(count(), 3), y(count()),
        codes(count()), transposed(count()), scale(2) {}

  static int multiple_of_16(const Shape& shape, const std::string& size) {
    return size_that(shape[size] % 16 == 0, shape, size, "a multiple of 16");
  }
  void reset() {
    for (Buffer<uint8_t>* output : {&codes, &transposed}) output->poison();
    y.poison();
  }
  size_t count() const { return size_t(rows) * columns; }
  double elements() const { return double(count()); }
  double bytes() const { return elements() * (3 * sizeof(T) + 2); }
  double flops() const { return 13 * elements(); }

  Fp8Scale* the_scale() const { return reinterpret_cast<Fp8Scale*>(scale.data()); }
  Fp8Cast cast(uint8_t* to) const { return {to, Fp8Format::e4m3, the_scale()}; }
  void clear_scale(cudaStream_t stream) { CUDA_CHECK(cudaMemsetAsync(scale.data(), 0, sizeof(Fp8Scale), stream)); }

  // What the codes stand for, in units of the matrix's largest number: a code is off by 2^-4 of itself, or by half of
  // the smallest one, and y is rounded before.
  std::vector<Output> outputs() const {
    const std::vector<double> numbers = y.numbers();
    double largest = 0;
    for (double number : numbers) largest = std::max(largest, std::abs(number));
    std::vector<double> values, of_transposed, expected = x.numbers();
    for (double& value : expected) value = gelu(value);
    const std::vector<uint8_t> straight = codes.get(), turned = transposed.get();
    for (size_t i = 0; i < count(); ++i) {
      values.push_back(value_of(straight[i]) * largest / 448);
      of_transposed.push_back(value_of(turned[i % size_t(columns) * size_t(rows) + i / size_t(columns)]) * largest / 448);
    }
    const double floor = largest / 448 * 0x1p-10 / 0.0625;
    return {{"y", numbers, expected, 1, 1e-6 + rounding<T>}, {"codes", values, numbers, floor, 0.0626},
            {"transposed", of_transposed, values, 0, 0}};
  }
  static double value_of(uint8_t code) {
    __nv_fp8_e4m3 number;
    number.__x = code;
    return to_float(number);
  }

  int rows, columns;
  RandomBuffer<T> x;
  Buffer<T> y;
  Buffer<uint8_t> codes, transposed;
  Buffer<float> scale;
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
  fp8_maximum<T>(o.the_scale(), o.y, o.count(), stream);
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

// ---- 3: the maximum where the matrix is written: what the model does
//
// GELU's threads have the numbers in registers. A warp finds the largest of its own in one instruction, and where a
// cached copy of the maximum is lower, raises it. y is read once less: three launches, and the least bytes.

template <class T>
void written_maximum(Fp8Operand<T>& o, cudaStream_t stream) {
  if (!std::is_same_v<T, __nv_bfloat16>) return transposing_cast(o, stream);  // GELU takes the maximum in bf16 alone
  o.clear_scale(stream);
  gelu_forward<T>(o.y, o.x, o.rows, o.columns, stream, &o.the_scale()->maximum);
  cast_transpose_fp8<T>(o.cast(o.codes), o.transposed, o.y, o.rows, o.columns, stream);
}

template <class T>
std::vector<Rung<Fp8Operand<T>>> Fp8Operand<T>::rungs() {
  return {
      {"step_by_step", "5 launches: maximum cleared, GELU, maximum, cast, transpose byte by byte", step_by_step<T>},
      {"transposing_cast", "4 launches: one writes the codes in both orientations, through shared memory", transposing_cast<T>},
      {"written_maximum", "3 launches: GELU raises the maximum of what it writes, which is read once less", written_maximum<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<Fp8Operand>(count, arguments); }
