// Matrices in eight bits, and their products, against float64.
#include "extensions/fp8/kernels/fp8.cuh"
#include "extensions/fp8/kernels/fp8_tiles.cuh"
#include "extensions/fp8/kernels/matmul_fp8.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "test/kernel_test.cuh"
#include "test/reference_file.h"

namespace {

using Float = __nv_bfloat16;
const char* const no_fp8 = "this GPU has no tensor cores for eight bits";
constexpr Fp8Format formats[] = {Fp8Format::e4m3, Fp8Format::e5m2};

double largest(Fp8Format format) { return format == Fp8Format::e4m3 ? 448 : 57344; }
double value_of(uint8_t code, Fp8Format format) {
  __nv_fp8_e4m3 four;
  __nv_fp8_e5m2 five;
  four.__x = five.__x = code;
  return format == Fp8Format::e4m3 ? to_float(four) : to_float(five);
}

// A scale of its own.
struct Scales {
  Scales() {
    CUDA_CHECK(cudaMemset(scale.data(), 0, sizeof(Fp8Scale)));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));  // other streams do not wait for it
  }
  Fp8Scale read() const { return scale.get()[0]; }
  operator Fp8Scale*() const { return scale.data(); }
  float* maximum() const { return &scale.data()->maximum; }
  Buffer<Fp8Scale> scale{1};
};

template <class T>
double maximum_of(const std::vector<T>& values) {
  double found = 0;
  for (const T& x : values) found = std::max(found, std::abs(double(to_float(x))));
  return found;
}

// A code is off by half a unit in its last place, 2^-4 of it in e4m3 and 2^-3 in e5m2, or by half the smallest number;
// the factor, and x times the factor, by 2^-24 each, which moves a tie at most.
template <class T>
void check_codes(const std::vector<uint8_t>& codes, const std::vector<T>& values, const Fp8Scale& scale, Fp8Format format) {
  const double half = format == Fp8Format::e4m3 ? 0.0625 : 0.125, smallest = format == Fp8Format::e4m3 ? 0x1p-10 : 0x1p-17;
  const double maximum = maximum_of(values);
  CHECK(scale.maximum == float(maximum));
  CHECK(double(scale.unit) == about(maximum / largest(format), 1e-7));
  REQUIRE(codes.size() == values.size());
  double worst = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    const double x = to_float(values[i]) * largest(format) / maximum;
    worst = std::max(worst, std::abs(value_of(codes[i], format) - x) / std::max(half * std::abs(x), smallest));
  }
  CHECK_WITHIN("codes", worst, 1.0 + 1e-6);
}

template <class T>
void check_cast(int rows, int columns, Fp8Format format) {
  CAPTURE(rows);
  CAPTURE(columns);
  const size_t count = size_t(rows) * columns;
  const auto values = random_values<T>(count, 3);
  const Buffer<T> x(values);
  const Scales scales;
  fp8_maximum<T>(scales.maximum(), x, count, test_stream());
  const Buffer<uint8_t> codes(count);
  cast_fp8<T>({codes.data(), format, scales}, x, count, test_stream());
  check_codes(codes.get(), values, scales.read(), format);
  if (rows % 16 != 0) return;
  const Buffer<uint8_t> again(count), transposed(count), alone(count);
  cast_transpose_fp8<T>({again.data(), format, scales}, transposed.data(), x, rows, columns, test_stream());
  cast_transpose_fp8<T>({nullptr, format, scales}, alone.data(), x, rows, columns, test_stream());
  CHECK(again.get() == codes.get());
  std::vector<uint8_t> wanted(count);
  const std::vector<uint8_t> stored = codes.get();
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) wanted[size_t(c) * rows + r] = stored[size_t(r) * columns + c];
  CHECK(transposed.get() == wanted);
  CHECK(alone.get() == wanted);
  const Buffer<uint8_t> of_codes(count);
  transpose_fp8(of_codes.data(), codes.data(), format, rows, columns, test_stream());
  CHECK(of_codes.get() == wanted);
}

// The codes of a matrix with units of tiles, or of blocks, as cast_tiles_fp8 writes them.
struct TileOperand {
  TileOperand(const std::vector<Float>& values, int rows, int columns, Fp8Format format, Fp8Units units, bool alone = false)
      : format(format), units(units), values(values), codes{Buffer<uint8_t>(values.size()), Buffer<uint8_t>(values.size())},
        scales{Buffer<float>(units_of(rows, columns)), Buffer<float>(units_of(columns, rows))} {
    const Buffer<Float> x(values);
    const Fp8TileCast straight = {codes[0].data(), scales[0].data()}, transposed = {codes[1].data(), scales[1].data()};
    if (alone) {  // each orientation by itself
      cast_tiles_fp8<Float>(straight, {}, format, units, x, rows, columns, test_stream());
      cast_tiles_fp8<Float>({}, transposed, format, units, x, rows, columns, test_stream());
    } else {
      cast_tiles_fp8<Float>(straight, transposed, format, units, x, rows, columns, test_stream());
    }
    for (int i = 0; i < 2; ++i) stored[i] = codes[i].get(), scale[i] = scales[i].get();
  }
  size_t units_of(int rows, int columns) const {
    return units == Fp8Units::tiles ? fp8_tile_units(rows, columns) : fp8_block_units(rows, columns);
  }
  Fp8Matrix matrix(bool transposed) const { return {codes[transposed].data(), format, scales[transposed].data(), units}; }
  // What the codes of the matrix, or of its transpose, say: (rows, columns) of that.
  std::vector<double> meant(bool transposed, int rows, int columns) const {
    const Fp8Matrix on_host = {nullptr, format, scale[transposed].data(), units};
    std::vector<double> all(size_t(rows) * columns);
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; ++c)
        all[size_t(r) * columns + c] = value_of(stored[transposed][size_t(r) * columns + c], format) *
                                       double(on_host.unit_of(size_t(r), size_t(c), size_t(rows), size_t(columns)));
    return all;
  }

  Fp8Format format;
  Fp8Units units;
  std::vector<Float> values;
  Buffer<uint8_t> codes[2];
  Buffer<float> scales[2];
  std::vector<uint8_t> stored[2];
  std::vector<float> scale[2];
};

// Numbers of many sizes: each row and each column has its own.
std::vector<Float> many_sizes(int rows, int columns, unsigned seed) {
  std::vector<Float> values = random_values<Float>(size_t(rows) * columns, 1, 0, seed);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) {
      Float& x = values[size_t(r) * columns + c];
      x = from_float<Float>(std::ldexp(to_float(x), (7 * r) % 23 - (5 * c) % 19));
    }
  return values;
}

// What a code stands for is off by the half unit of check_codes, in units of its own tile's largest number.
void check_tiles(int rows, int columns, Fp8Format format, Fp8Units units) {
  CAPTURE(rows);
  CAPTURE(columns);
  const std::vector<Float> values = many_sizes(rows, columns, 3);
  const TileOperand cast(values, rows, columns, format, units);
  const double half = format == Fp8Format::e4m3 ? 0.0625 : 0.125, smallest = format == Fp8Format::e4m3 ? 0x1p-10 : 0x1p-17;
  for (const bool transposed : {false, true}) {
    CAPTURE(transposed);
    const int own_rows = transposed ? columns : rows, own_columns = transposed ? rows : columns;
    const auto x = [&](int r, int c) { return double(to_float(values[transposed ? size_t(c) * columns + r : size_t(r) * columns + c])); };
    const std::vector<double> meant = cast.meant(transposed, own_rows, own_columns);
    const int height = units == Fp8Units::tiles ? 1 : fp8_tile;
    double worst = 0;
    for (int r = 0; r < own_rows; ++r)
      for (int c = 0; c < own_columns; ++c) {
        double maximum = 0;
        if (r % height == 0 && c % fp8_tile == 0) {  // once for each tile
          for (int i = r; i < std::min(r + height, own_rows); ++i)
            for (int j = c; j < std::min(c + fp8_tile, own_columns); ++j) maximum = std::max(maximum, std::abs(x(i, j)));
          const double unit = maximum / largest(format);
          for (int i = r; i < std::min(r + height, own_rows); ++i)
            for (int j = c; j < std::min(c + fp8_tile, own_columns); ++j)
              worst = std::max(worst, std::abs(meant[size_t(i) * own_columns + j] - x(i, j)) / std::max(half * std::abs(x(i, j)), smallest * unit));
        }
      }
    CHECK_WITHIN("codes of tiles", worst, 1.0 + 1e-5);
  }
  if (units == Fp8Units::tiles) {
    const TileOperand alone(values, rows, columns, format, units, true);
    for (int i = 0; i < 2; ++i) CHECK((alone.stored[i] == cast.stored[i] && alone.scale[i] == cast.scale[i]));
  } else {  // the same codes in both orientations
    bool same = true;
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; ++c) same &= cast.stored[0][size_t(r) * columns + c] == cast.stored[1][size_t(c) * rows + r];
    CHECK(same);
  }
}

// launch(maximum) writes `out`: the maximum that it leaves is the one that a launch of its own finds, bit for bit, and `out`
// is as without it.
template <class Launch>
void check_maximum_of(const Buffer<Float>& out, size_t count, Launch launch) {
  const auto write = [&](float* maximum) { return launch(maximum), out.get(); };
  const Scales left, found;
  const std::vector<Float> alone = write(nullptr);
  CHECK(same_bits(write(left.maximum()), alone));
  fp8_maximum<Float>(found.maximum(), out, count, test_stream());
  CHECK(std::bit_cast<uint32_t>(left.read().maximum) == std::bit_cast<uint32_t>(found.read().maximum));
}

// Tensors whose numbers are of many sizes; `special`, if it is not zero, is among the inputs.
void check_maxima(int rows, int columns, float special) {
  CAPTURE(columns);
  CAPTURE(special);
  const size_t count = size_t(rows) * columns;
  std::vector<Float> values = random_values<Float>(count, 3);
  if (special != 0) values[count - 7] = from_float<Float>(special);
  const auto gradients = random_values<Float>(count, 1, 0, 2);
  const Buffer<Float> x(values), dout(gradients), weight(random_values<Float>(size_t(columns), 0.3, 1, 3));
  const Buffer<Float> bias(random_values<Float>(size_t(columns), 0.5, 0, 4));
  Buffer<Float> out(count);
  check_maximum_of(out, count, [&](float* maximum) { gelu_forward<Float>(out, x, rows, columns, test_stream(), maximum); });
  check_maximum_of(out, count, [&](float* maximum) {
    out = gradients;
    gelu_backward<Float>(out, x, rows, columns, test_stream(), maximum);
  });
  const Float* no_branch = nullptr;
  const Buffer<float> mean(rows), rstd(rows), dweight(columns), dbias(columns);
  const Buffer<float> workspace(layernorm_workspace(rows, columns));
  check_maximum_of(out, count, [&](float* maximum) {
    residual_layernorm_forward<Float>(out, out, mean, rstd, x, no_branch, weight, bias, rows, columns, test_stream(), maximum);
  });
  check_maximum_of(out, count, [&](float* maximum) {
    out = gradients;
    layernorm_backward<Float>(out, dweight, dbias, dout, x, weight, mean, rstd, rows, columns, false, workspace, test_stream(), maximum);
  });
}

// ---- products

struct Operand {
  Operand(int rows, int columns, Fp8Format format, unsigned seed, double scale = 1)
      : format(format), values(random_values<Float>(size_t(rows) * columns, scale, 0, seed)), codes(values.size()) {
    const Buffer<Float> x(values);
    fp8_maximum<Float>(scales.maximum(), x, values.size(), test_stream());
    cast_fp8<Float>({codes.data(), format, scales}, x, values.size(), test_stream());
    stored = codes.get();
    unit = scales.read().unit;
  }
  Fp8Matrix matrix() const { return {codes.data(), format, &scales.scale.data()->unit}; }
  double operator[](size_t i) const { return value_of(stored[i], format) * unit; }

  Fp8Format format;
  std::vector<Float> values;
  Scales scales;
  Buffer<uint8_t> codes;
  std::vector<uint8_t> stored;
  double unit;
};

// Sums of k products of what the codes say, bias and what was there before, and a rounding to Out (test/bounds.h).
template <class Out>
void check_product(int m, int n, int k, Fp8Format format_a, Fp8Format format_b, bool accumulate, bool with_bias, bool fast = false) {
  CAPTURE(m);
  CAPTURE(accumulate);
  CAPTURE(with_bias);
  const Operand a(m, k, format_a, 1), b(n, k, format_b, 2);
  const auto bias = random_values<Float>(size_t(n), 1, 0, 3);
  const auto before = random_values<Out>(size_t(m) * n, 1, 0, 4);
  const Buffer<Float> bias_d(bias);
  Buffer<Out> d(before.size());
  if (accumulate) d = before;
  const GemmShape shape = {.m = m, .n = n, .k = k, .transpose_b = true, .accumulate = accumulate, .fast_sums = fast};
  matmul_fp8("matmul", d.data(), a.matrix(), b.matrix(), with_bias ? bias_d.data() : nullptr, shape, test_stream());
  std::vector<double> expected(before.size());
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = (accumulate ? to_float(before[size_t(i) * n + j]) : 0.0) + (with_bias ? to_float(bias[size_t(j)]) : 0.0);
      for (int p = 0; p < k; ++p) sum += a[size_t(i) * k + p] * b[size_t(j) * k + p];
      expected[size_t(i) * n + j] = sum;
    }
  CHECK_CLOSE(d.numbers(), expected, std::sqrt(k + 2.0), eight_bit_sum_error(k + 2) + rounding<Out>);
}

// The same with units of tiles, which must be found where they lie; b has units of tiles or of blocks. Returns the largest
// error in units of what a sum in float may be off by.
template <class Out>
double check_tile_product(int m, int n, int k, Fp8Units units_b, bool with_bias) {
  CAPTURE(m);
  CAPTURE(k);
  const TileOperand a(many_sizes(m, k, 1), m, k, Fp8Format::e4m3, Fp8Units::tiles), b(many_sizes(n, k, 2), n, k, Fp8Format::e4m3, units_b);
  const auto bias = random_values<Float>(size_t(n), 1, 0, 3);
  const Buffer<Float> bias_d(bias);
  Buffer<Out> d(size_t(m) * n);
  matmul_fp8("matmul", d.data(), a.matrix(false), b.matrix(false), with_bias ? bias_d.data() : nullptr,
             {.m = m, .n = n, .k = k, .transpose_b = true}, test_stream());
  const std::vector<double> of_a = a.meant(false, m, k), of_b = b.meant(false, n, k), got = d.numbers();
  // Each product and unit is rounded to float (2^-24 each for the two numbers and their product), then the sum of k terms
  // and the bias (test/bounds.h); by the root of the terms' squares, since rows are of many sizes.
  double worst = 0, worst_in_float = 0;
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = with_bias ? to_float(bias[size_t(j)]) : 0.0, squares = sum * sum, size = std::abs(sum);
      for (int p = 0; p < k; ++p) {
        const double term = of_a[size_t(i) * k + p] * of_b[size_t(j) * k + p];
        sum += term, squares += term * term, size += std::abs(term);
      }
      const double error = std::abs(got[size_t(i) * n + j] - sum);
      worst = std::max(worst, error / (product_error(eight_bit_sum_error(k + 4), rounding<Out>, sum, std::sqrt(squares)) + 1e-30));
      worst_in_float = std::max(worst_in_float, error / (0x1p-24 * (k + 4) * size + rounding<Out> * std::abs(sum) + 1e-30));
    }
  CHECK_WITHIN("product of tiles", worst, 1.0);
  return worst_in_float;
}

}  // namespace

TEST_CASE("tiles: each has a unit by its own largest number, along rows and along columns") {
  for (const Fp8Format format : formats)
    for (const Fp8Units units : {Fp8Units::tiles, Fp8Units::blocks}) {
      check_tiles(16, 16, format, units);
      check_tiles(48, 208, format, units);   // tiles that are not full
      check_tiles(272, 144, format, units);
      if (large_shapes) check_tiles(400, 1040, format, units);
    }
}

// The H200's errors: cuBLASLt 13.1, 2026-11-26 (dev/results/2026-11-26-h200.md).
TEST_CASE("tiles: products by the unit of each, and with GPT_CPU_SUMS=hopper sums have the errors of an H200") {
  if (!has_fp8_tiles()) return skip("this GPU has no products by tiles");
  std::vector<double> errors;
  for (const Fp8Units units : {Fp8Units::tiles, Fp8Units::blocks}) {
    errors.push_back(check_tile_product<Float>(48, 144, 272, units, true));
    errors.push_back(check_tile_product<float>(144, 32, 80, units, false));
    errors.push_back(check_tile_product<float>(16, 272, 656, units, false));  // more than four tiles, whose units of blocks are padded
  }
  const double of_h200[] = {7.0114, 55.8116, 3.96878, 4.22442, 56.6558, 3.50128};
  for (size_t i = 0; i < errors.size(); ++i) {
    CAPTURE(i);
    if (!device_attribute(cudaDevAttrIntegrated)) continue;  // another version of the library may add in another order
    if (eight_bit_sums_have_14_bits()) CHECK(errors[i] == about(of_h200[i], 1e-5));
    else CHECK(errors[i] <= 1);
  }
}

TEST_CASE("tiles: what is not finite stays so, in its tile alone") {
  for (const float bad : {INFINITY, NAN}) {
    std::vector<Float> values(16 * 272, Float(1.0f));
    values[3 * 272 + 140] = from_float<Float>(bad);
    const TileOperand cast(values, 16, 272, Fp8Format::e4m3, Fp8Units::tiles);
    const std::vector<double> meant = cast.meant(false, 16, 272);
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 272; ++c) CHECK(std::isfinite(meant[size_t(r) * 272 + c]) == !(r == 3 && c >= 128 && c < 256));
  }
}

TEST_CASE_TEMPLATE("codes by the scale of the largest number, and transposed", T, __nv_bfloat16, float) {
  for (const Fp8Format format : formats) {
    check_cast<T>(1, 16, format);
    check_cast<T>(5, 48, format);     // rows that no transpose takes
    check_cast<T>(16, 16, format);
    check_cast<T>(48, 208, format);   // tiles that are not full
    check_cast<T>(144, 80, format);
    if (large_shapes) check_cast<T>(272, 1040, format);
  }
}

TEST_CASE("the launch that writes a tensor leaves its maximum") {
  for (const float special : {0.0f, 1e4f, -INFINITY, NAN}) {
    check_maxima(5, 48, special);
    check_maxima(37, 208, special);
    check_maxima(16, 51, special);   // packs of one element
    check_maxima(3, 2064, special);  // more packs than threads
  }
}

TEST_CASE("zeros, tiny numbers and what is not finite") {
  if (!has_fp8()) return skip(no_fp8);
  const auto product_of = [](float x) {
    std::vector<Float> values(16 * 16, Float(0.0f));
    values[37] = from_float<Float>(x);
    const Buffer<Float> numbers(values);
    const Scales scales;
    const Buffer<uint8_t> codes(values.size());
    fp8_maximum<Float>(scales.maximum(), numbers, values.size(), test_stream());
    cast_fp8<Float>({codes.data(), Fp8Format::e4m3, scales}, numbers, values.size(), test_stream());
    Buffer<float> d(16 * 16);
    const Fp8Matrix matrix = {codes.data(), Fp8Format::e4m3, &scales.scale.data()->unit};
    const Operand other(16, 16, Fp8Format::e4m3, 5);
    matmul_fp8("matmul", d.data(), other.matrix(), matrix, nullptr, {.m = 16, .n = 16, .k = 16, .transpose_b = true}, test_stream());
    return d.numbers();
  };
  for (const double x : product_of(0)) CHECK(x == 0);
  for (const double x : product_of(1e-38f)) CHECK(std::isfinite(x));
  // Wherever it lies: all of the product is not finite, so that the norm of the gradients sees it.
  for (const float bad : {INFINITY, -INFINITY, NAN})
    for (const double x : product_of(bad)) CHECK(!std::isfinite(x));
}

TEST_CASE("products of what the codes say") {
  if (!has_fp8()) return skip(no_fp8);
  for (const bool option : {false, true}) {
    check_product<Float>(64, 48, 80, Fp8Format::e4m3, Fp8Format::e4m3, false, option);
    check_product<Float>(5, 32, 144, Fp8Format::e5m2, Fp8Format::e4m3, false, false);  // few rows, as in sampling
    check_product<float>(48, 64, 112, Fp8Format::e4m3, Fp8Format::e5m2, option, false);
    check_product<Float>(16, 32, 656, Fp8Format::e4m3, Fp8Format::e4m3, false, false, option);
    if (large_shapes) check_product<float>(528, 400, 96, Fp8Format::e4m3, Fp8Format::e4m3, option, false);
  }
}

// The codes of PyTorch 2.13: what each stands for, and what numbers become (dev/reference_fp8.py; it has no saturation,
// so these are within the format's range).
TEST_CASE("codes are PyTorch's") {
  const SafetensorsFile file("test/reference/fp8/reference.safetensors");
  for (const Fp8Format format : formats) {
    const std::string name = format == Fp8Format::e4m3 ? "e4m3" : "e5m2";
    const std::vector<float> values = tensor_of(file, name + ".values"), numbers = tensor_of(file, name + ".numbers"), codes = tensor_of(file, name + ".codes");
    for (size_t code = 0; code < 256; ++code) {
      CAPTURE(code);
      const float got = float(value_of(uint8_t(code), format));
      CHECK((std::isnan(values[code]) ? std::isnan(got) : got == values[code]));
    }
    for (size_t i = 0; i < numbers.size(); ++i) {
      CAPTURE(numbers[i]);
      CHECK(int(__nv_cvt_float_to_fp8(numbers[i], __NV_SATFINITE, format == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2)) == int(codes[i]));
    }
  }
}
