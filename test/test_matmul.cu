// Matrix products against float64: exactly, on small integers, and closely on random numbers.
#include <algorithm>
#include <numeric>

#include "kernels/linear.cuh"
#include "test/gelu_reference.h"
#include "test/kernel_test.cuh"

namespace {

using Numbers = std::vector<double>;

// op(A) (m,k) · op(B) (k,n) + d (m,n)
Numbers product(const Numbers& a, const Numbers& b, const GemmShape& s, Numbers d = {}) {
  d.resize(size_t(s.m) * s.n);
  for (int i = 0; i < s.m; ++i)
    for (int p = 0; p < s.k; ++p) {
      const double x = a[s.transpose_a ? size_t(p) * s.m + i : size_t(i) * s.k + p];
      for (int j = 0; j < s.n; ++j)
        d[size_t(i) * s.n + j] += x * b[s.transpose_b ? size_t(j) * s.k + p : size_t(p) * s.n + j];
    }
  return d;
}

Numbers add_to_rows(Numbers matrix, const Numbers& row) {
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] += row[i % row.size()];
  return matrix;
}

Numbers column_sums(const Numbers& matrix, int columns, Numbers sums = {}) {
  sums.resize(columns);
  for (size_t i = 0; i < matrix.size(); ++i) sums[i % columns] += matrix[i];
  return sums;
}

template <class T>
Numbers rounded(Numbers numbers) {
  for (double& x : numbers) x = to_float(from_float<T>(float(x)));
  return numbers;
}

// Sums of n = k + 2 terms of size 1 (products, bias, what was there before), rounded to Out.
template <class In>
double sum_error(int k) {
  return sizeof(In) == 2 ? tensor_core_sum_error(k + 2) : float_sum_error(k + 2);
}
#define CHECK_SUMS(actual, expected, k, In, Out) \
  CHECK_CLOSE(actual, expected, std::sqrt(k + 2.0), sum_error<In>(k) + rounding<Out>)

template <class In, class Out>
struct Operands {
  std::vector<In> a, b, bias;
  std::vector<Out> d;
};

template <class In, class Out>
Numbers run(const Operands<In, Out>& in, const GemmShape& s, bool with_bias) {
  Buffer<In> a(in.a), b(in.b), bias(in.bias);
  Buffer<Out> d(in.d.size());
  if (s.accumulate) d = in.d;
  matmul<In, Out>("matmul", d, a, b, s, test_stream(), with_bias ? bias.data() : nullptr);
  return d.numbers();
}

// Magnitudes that may be rounded to Out by themselves before the result is (test/bounds.h).
template <class In, class Out>
Numbers rounded_before(const Operands<In, Out>& in, const GemmShape& s, bool with_bias) {
  Numbers magnitudes = product(as_double(in.a), as_double(in.b), s);
  for (size_t i = 0; i < magnitudes.size(); ++i) {
    const double bias = with_bias ? to_float(in.bias[i % size_t(s.n)]) : 0;
    magnitudes[i] = s.accumulate ? std::abs(magnitudes[i]) + std::abs(bias) + std::abs(to_float(in.d[i])) : 0;
  }
  return magnitudes;
}

template <class In, class Out>
Numbers reference(const Operands<In, Out>& in, const GemmShape& s, bool with_bias) {
  const Numbers d = product(as_double(in.a), as_double(in.b), s, s.accumulate ? as_double(in.d) : Numbers());
  return with_bias ? add_to_rows(d, as_double(in.bias)) : d;
}

template <class In, class Out>
void check(int m, int n, int k) {
  CAPTURE(m);
  CAPTURE(n);
  CAPTURE(k);
  const size_t size_a = size_t(m) * k, size_b = size_t(k) * n, size_d = size_t(m) * n;
  const Operands<In, Out> integers = {random_integers<In>(size_a, 4), random_integers<In>(size_b, 4, 2),
                                      random_integers<In>(n, 100, 3), random_integers<Out>(size_d, 100, 4)};
  const Operands<In, Out> small = {random_integers<In>(size_a, 1), random_integers<In>(size_b, 1, 2),
                                   random_integers<In>(n, 40, 3), random_integers<Out>(size_d, 40, 4)};
  const Operands<In, Out> numbers = {random_values<In>(size_a), random_values<In>(size_b, 1, 0, 2),
                                     random_values<In>(n, 1, 0, 3), random_values<Out>(size_d, 1, 0, 4)};
  constexpr int choices = std::is_same_v<In, Out> ? 16 : 8;  // weight gradients, in float, have no bias
  for (int choice = 0; choice < choices; ++choice) {
    const GemmShape s = {m, n, k, bool(choice & 1), bool(choice & 2), bool(choice & 4)};
    const bool with_bias = choice & 8;
    CAPTURE(s.transpose_a);
    CAPTURE(s.transpose_b);
    CAPTURE(s.accumulate);
    CAPTURE(with_bias);
    // Integer sums are exact in float, in any order; then one rounding to Out. A product that adds to D may round to Out
    // before, too: there no number is larger than 256, so that Out has all of them.
    const auto& exact = s.accumulate ? small : integers;
    const Numbers wanted = reference(exact, s, with_bias);
    CHECK(run(exact, s, with_bias) == rounded<Out>(wanted));
    for (const Numbers& all : {wanted, rounded_before(small, s, with_bias)})
      if (s.accumulate) CHECK(std::ranges::all_of(all, [](double x) { return std::abs(x) <= 256; }));
    const Numbers actual = run(numbers, s, with_bias), expected = reference(numbers, s, with_bias);
    const Numbers before = rounded_before(numbers, s, with_bias);
    double worst = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      const double bound = product_error(sum_error<In>(k), rounding<Out>, expected[i], std::sqrt(k + 2.0), before[i]);
      worst = std::max(worst, std::isnan(actual[i]) ? INFINITY : std::abs(actual[i] - expected[i]) / bound);
    }
    CHECK_WITHIN(s.accumulate ? "a product that adds" : "a product", worst, 1);
  }
}

template <class In, class Out>
void check_shapes() {
  check<In, Out>(1, 1, 1);
  check<In, Out>(1, 51, 17);    // one row, nothing a multiple of anything
  check<In, Out>(37, 8, 51);
  check<In, Out>(64, 64, 64);
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check<In, Out>(67, 211, 700);
  check<In, Out>(513, 401, 9);  // cpu/gemm.h cuts 513 rows in 320 + 193, 401 columns in 256 + 145
  check<In, Out>(1030, 3, 33);
  check<In, Out>(5, 1000, 33);
}

template <class T>
void check_linear(int rows, int inputs, int outputs, bool accumulate) {
  CAPTURE(rows);
  CAPTURE(accumulate);
  const auto x = random_values<T>(size_t(rows) * inputs);
  const auto weight = random_values<T>(size_t(inputs) * outputs, 1, 0, 2);
  const auto bias = random_values<T>(outputs, 1, 0, 3);
  const auto dout = random_values<T>(size_t(rows) * outputs, 1, 0, 4);
  const auto dweight_before = random_values<float>(weight.size(), 1, 0, 5);
  const auto dbias_before = random_values<float>(outputs);
  Buffer<T> x_d(x), weight_d(weight), bias_d(bias), dout_d(dout), out(dout.size()), dx(x.size());
  Buffer<float> dweight(weight.size()), dbias(outputs), workspace(linear_workspace(rows, outputs));
  if (accumulate) dweight = dweight_before, dbias = dbias_before;
  linear_forward<T>(out, x_d, weight_d, bias_d, rows, inputs, outputs, test_stream());
  linear_input_gradient<T>(dx, dout_d, weight_d, rows, inputs, outputs, test_stream());
  linear_weight_gradient<T>(dweight, dbias, dout_d, x_d, rows, inputs, outputs, accumulate, workspace, test_stream());

  const Numbers X = as_double(x), W = as_double(weight), dY = as_double(dout);
  const Numbers expected_out = add_to_rows(product(X, W, {rows, outputs, inputs}), as_double(bias));
  const Numbers expected_dx = product(dY, W, {.m = rows, .n = inputs, .k = outputs, .transpose_b = true});
  const Numbers expected_dweight = product(X, dY, {.m = inputs, .n = outputs, .k = rows, .transpose_a = true},
                                           accumulate ? as_double(dweight_before) : Numbers());
  const Numbers expected_dbias = column_sums(dY, outputs, accumulate ? as_double(dbias_before) : Numbers());
  CHECK_SUMS(out.numbers(), expected_out, inputs, T, T);
  CHECK_SUMS(dx.numbers(), expected_dx, outputs, T, T);
  CHECK_SUMS(dweight.numbers(), expected_dweight, rows, T, float);
  CHECK_SUMS(dbias.numbers(), expected_dbias, rows, float, float);
}

// A product and gelu, or its gradient, in one launcher: what gelu gets is off by the rounding of the product, and
// gelu's slopes are at most 1.13, its curvature 0.8.
template <class T>
void check_gelu(int rows, int inputs, int outputs) {
  CAPTURE(rows);
  CAPTURE(inputs);
  const auto x = random_values<T>(size_t(rows) * inputs), bias = random_values<T>(outputs, 1, 0, 3);
  const auto weight = random_values<T>(size_t(inputs) * outputs, 0.2, 0, 2), dout = random_values<T>(size_t(rows) * outputs, 1, 0, 4);
  const auto before_dx = random_values<T>(x.size(), 1, 0, 5);
  Buffer<T> x_d(x), weight_d(weight), bias_d(bias), dout_d(dout), before_dx_d(before_dx), out(dout.size()), before(dout.size()),
      dx(x.size());
  linear_gelu_forward<T>(out, before, x_d, weight_d, bias_d, rows, inputs, outputs, test_stream());
  linear_gelu_gradient<T>(dx, dout_d, weight_d, before_dx_d, rows, inputs, outputs, test_stream());

  const Numbers X = as_double(x), W = as_double(weight);
  const Numbers expected_before = add_to_rows(product(X, W, {rows, outputs, inputs}), as_double(bias));
  Numbers expected_out = expected_before;
  for (double& value : expected_out) value = gelu(value);
  Numbers expected_dx = product(as_double(dout), W, {.m = rows, .n = inputs, .k = outputs, .transpose_b = true});
  for (size_t i = 0; i < expected_dx.size(); ++i) expected_dx[i] *= gelu_slope(to_float(before_dx[i]));
  CHECK_SUMS(before.numbers(), expected_before, inputs, T, T);
  const double k = std::max(inputs, outputs), sum = sum_error<T>(int(k)) + rounding<T>;
  CHECK_CLOSE(out.numbers(), expected_out, std::sqrt(k), 1.13 * sum + rounding<T> + 1e-6);
  CHECK_CLOSE(dx.numbers(), expected_dx, std::sqrt(k), 1.13 * sum + rounding<T> + 1.5e-5);
}

template <class T>
void check_head(int rows, int channels, int padded, bool accumulate) {
  CAPTURE(rows);
  CAPTURE(accumulate);
  const auto x = random_values<T>(size_t(rows) * channels);
  const auto wte = random_values<T>(size_t(padded) * channels, 1, 0, 2);
  const auto dlogits = random_values<T>(size_t(rows) * padded, 1, 0, 3);
  const auto dwte_before = random_values<float>(wte.size(), 1, 0, 4);
  Buffer<T> x_d(x), wte_d(wte), dlogits_d(dlogits), logits(dlogits.size()), dx(x.size());
  Buffer<float> dwte(wte.size());
  if (accumulate) dwte = dwte_before;
  head_forward<T>(logits, x_d, wte_d, rows, channels, padded, test_stream());
  head_backward<T>(dx, dwte, dlogits_d, x_d, wte_d, rows, channels, padded, accumulate, test_stream());

  const Numbers X = as_double(x), W = as_double(wte), dL = as_double(dlogits);
  const Numbers expected_logits = product(X, W, {.m = rows, .n = padded, .k = channels, .transpose_b = true});
  const Numbers expected_dwte = product(dL, X, {.m = padded, .n = channels, .k = rows, .transpose_a = true},
                                        accumulate ? as_double(dwte_before) : Numbers());
  CHECK_SUMS(logits.numbers(), expected_logits, channels, T, T);
  CHECK_SUMS(dx.numbers(), product(dL, W, {rows, channels, padded}), padded, T, T);
  CHECK_SUMS(dwte.numbers(), expected_dwte, rows, T, float);
}

}  // namespace

TEST_CASE("fp32 products") { check_shapes<float, float>(); }

TEST_CASE("bf16 products") { check_shapes<__nv_bfloat16, __nv_bfloat16>(); }

TEST_CASE("fp16 products") {
  check_shapes<__half, __half>();
  check_shapes<__half, float>();
}

TEST_CASE("bf16 products with a float result") { check_shapes<__nv_bfloat16, float>(); }

TEST_CASE_TEMPLATE("linear layer", T, float, __nv_bfloat16, __half) {
  for (bool accumulate : {false, true}) {
    check_linear<T>(1, 51, 153, accumulate);
    check_linear<T>(70, 64, 192, accumulate);  // two levels of column sums
    check_linear<T>(144, 51, 204, accumulate);
  }
}

TEST_CASE_TEMPLATE("linear layer and gelu at once", T, float, __nv_bfloat16, __half) {
  check_gelu<T>(37, 48, 64);
  check_gelu<T>(5, 51, 17);  // rows that no epilogue can take
}

TEST_CASE_TEMPLATE("output head", T, float, __nv_bfloat16, __half) {
  for (bool accumulate : {false, true}) {
    check_head<T>(1, 51, 128, accumulate);
    check_head<T>(144, 51, 256, accumulate);
    check_head<T>(30, 64, 640, accumulate);
  }
}

namespace {

// Cuts x behind the bit of 2^exponent.
double cut(double x, int exponent) { return std::ldexp(std::trunc(std::ldexp(x, -exponent)), exponent); }

// The sum as tensor cores make it (test/bounds.h): `at_once` products and the running sum lose what lies more than `bits`
// bits behind the leading bit of the largest, and the new sum what its type has no bits for.
double played_sum(const Numbers& products, size_t at_once, int bits) {
  double sum = 0;
  for (size_t first = 0; first < products.size(); first += at_once) {
    Numbers terms(products.begin() + first, products.begin() + std::min(first + at_once, products.size()));
    terms.push_back(sum);
    double largest = 0;
    for (const double x : terms) largest = std::max(largest, std::abs(x));
    if (largest == 0) continue;
    sum = 0;
    for (const double x : terms) sum += cut(x, std::ilogb(largest) - bits);
    if (sum != 0) sum = cut(sum, std::ilogb(sum) - std::min(bits, 23));
  }
  return sum;
}

// The largest error of many sums of k products, as a share of √k + |sum|.
template <class Round>
double played_error(int k, size_t at_once, int bits, Round round) {
  const int sums = 2000;
  const Numbers a = as_double(random_values<float>(size_t(sums) * k)), b = as_double(random_values<float>(a.size(), 1, 0, 2));
  double worst = 0;
  for (int i = 0; i < sums; ++i) {
    Numbers products;
    for (int p = 0; p < k; ++p) products.push_back(round(a[size_t(i) * k + p]) * round(b[size_t(i) * k + p]));
    const double sum = std::accumulate(products.begin(), products.end(), 0.0);
    worst = std::max(worst, std::abs(played_sum(products, at_once, bits) - sum) / (std::sqrt(double(k)) + std::abs(sum)));
  }
  return worst;
}

}  // namespace

TEST_CASE("the bounds hold for sums as tensor cores make them") {
  const auto bf16 = [](double x) { return double(to_float(from_float<__nv_bfloat16>(float(x)))); };
  const auto e4m3 = [](double x) { return double(to_float(__nv_fp8_e4m3(float(x)))); };
  for (const int k : {16, 144, 1040}) {
    CAPTURE(k);
    CHECK_WITHIN("A100", played_error(k, 8, 24, bf16), tensor_core_sum_error(k));
    CHECK_WITHIN("H100", played_error(k, 16, 25, bf16), tensor_core_sum_error(k));
    const double eight_bits = played_error(k, 32, 13, e4m3);
    CHECK_WITHIN("eight bits", eight_bits, eight_bit_tensor_core_sum_error(k));
    CHECK(eight_bits > 10 * float_sum_error(k));
  }
}

TEST_CASE("of two ways to do the same, the faster one is chosen, unobserved") {
  Buffer<float> buffer(size_t(4) << 20);
  int listened = 0;
  gemm_choices().times = true;
  Profiler::instance().listener = [&](const char*, int, const WrittenTensor&, cudaStream_t) { ++listened; };
  const auto write = [&](int times) {
    KernelRange range("write", test_stream(), {});
    for (int i = 0; i < times; ++i)
      CUDA_CHECK(cudaMemsetAsync(buffer.data(), i, buffer.size() * sizeof(float), test_stream()));
    range.writes(buffer.data(), buffer.size());
  };
  const auto quick = [&] { return write(1), true; };
  const auto slow = [&] { return write(20), true; };
  const auto impossible = [] { return false; };
  CHECK(fusing_is_faster("test, quick", quick, slow, test_stream()));
  CHECK(fusing_is_faster("test, quick", slow, quick, test_stream()));  // as is known
  CHECK(!fusing_is_faster("test, slow", slow, quick, test_stream()));
  CHECK(!fusing_is_faster("test, impossible", impossible, slow, test_stream()));
  gemm_choices().times = false;
  CHECK(fusing_is_faster("test, quick", slow, quick, test_stream()));  // as is known
  CHECK(!fusing_is_faster("test, untimed", quick, slow, test_stream()));
  CHECK(!gemm_choices().known.contains(" test, untimed"));
  CHECK(listened == 0);
  write(1);
  CHECK(listened == 1);
  gemm_choices() = {};
  Profiler::instance().listener = nullptr;
}

TEST_CASE("ranks that learn the same texts know the same; where texts differ, the first holds") {
  GemmChoices choices;
  choices.library = "card";
  choices.known = {{"card product 1", "of this rank alone"}};
  choices.learn({"card product 2\nfused\n", "", "card product 2\nseparate\ncard product 3\nseparate\n"});
  CHECK(choices.known == std::map<std::string, std::string>{{"card product 2", "fused"}, {"card product 3", "separate"}});
  CHECK(choices.choose("product 2", [] { return "timed"; }) == "fused");
  CHECK(choices.choose("product 1", [] { return "timed"; }) == "");
  GemmChoices other;
  other.learn({lines_of(choices.known)});
  CHECK(other.known == choices.known);
}
