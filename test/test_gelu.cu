// GELU forward and backward against float64.
#include "kernels/gelu.cuh"
#include "test/gelu_reference.h"
#include "test/kernel_test.cuh"

namespace {

template <class T>
void check(int rows, int columns) {
  CAPTURE(rows);
  CAPTURE(columns);
  auto x = random_values<T>(size_t(rows) * columns, 3);
  const float special[] = {0.0f, 1e-30f, -1e-30f, 15.0f, -15.0f, 1e4f, -1e4f};  // the sigmoid is 0 or 1 from ±5 on
  for (size_t i = 0; i < std::min(x.size(), std::size(special)); ++i) x[i] = from_float<T>(special[i]);
  const auto gradient_before = random_values<T>(x.size(), 1, 0, 2);
  std::vector<double> expected_out = as_double(x), expected_gradient = as_double(gradient_before);
  for (size_t i = 0; i < x.size(); ++i) expected_gradient[i] *= gelu_slope(to_float(x[i]));
  for (double& value : expected_out) value = gelu(value);

  Buffer<T> input(x), out(x.size()), gradient(gradient_before);
  gelu_forward<T>(out, input, rows, columns, test_stream());
  gelu_backward<T>(gradient, input, rows, columns, test_stream());
  // The sigmoid s of 2u: its exponential is off by 4 roundings, and 4 more for each 1 of |2u|; x·s·(1 − s) makes less
  // than 0.4 of (1 + |2u|). Four more follow. Backward, 1 − s is off by 3 roundings of 1 for as long as s is not yet 1,
  // which is until x = 5; x·slope makes less than 40 of each.
  CHECK_CLOSE(out.numbers(), expected_out, 1.0, 4e-7 + rounding<T>);
  CHECK_CLOSE(gradient.numbers(), expected_gradient, 1.0, 1.2e-5 + rounding<T>);
}

}  // namespace

TEST_CASE_TEMPLATE("gelu forward and backward", T, float, __nv_bfloat16, __half) {
  check<T>(1, 1);
  check<T>(1, 51);    // packs of one element
  check<T>(3, 211);
  check<T>(1, 256);   // less than one block
  check<T>(7, 204);   // packs of 16 bytes in float only
  check<T>(7, 208);   // packs of 64 bytes in float only
  if (large_shapes) check<T>(129, 1024);
}

TEST_CASE_TEMPLATE("gelu hands on what is not finite", T, float, __nv_bfloat16, __half) {
  Buffer<T> input({from_float<T>(INFINITY), from_float<T>(NAN)}), out(2);
  gelu_forward<T>(out, input, 1, 2, test_stream());
  CHECK(out.numbers()[0] == INFINITY);
  CHECK(std::isnan(out.numbers()[1]));
}
