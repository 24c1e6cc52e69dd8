// Column sums: exact on integers, and close to float64 on random numbers.
#include "kernels/column_sum.cuh"
#include "test/kernel_test.cuh"

namespace {

using Numbers = std::vector<double>;

// The sums of `input`'s columns, added to `before` if there is any, from the kernel and in double.
template <class T>
struct Sums {
  Sums(const std::vector<T>& input, const std::vector<float>& before, int rows, int columns)
      : expected(columns) {
    Buffer<T> input_d(input);
    Buffer<float> out(columns), workspace(column_sum_workspace(rows, columns));
    if (!before.empty()) {
      out = before;
      expected = as_double(before);
    }
    for (size_t i = 0; i < input.size(); ++i) expected[i % columns] += to_float(input[i]);
    column_sum<T>(out, input_d, rows, columns, !before.empty(), workspace, test_stream());
    actual = out.numbers();
  }
  Numbers actual, expected;
};

template <class T>
void check(int rows, int columns) {
  CAPTURE(rows);
  CAPTURE(columns);
  const size_t count = size_t(rows) * columns;
  for (const auto& before : {std::vector<float>(), random_integers<float>(columns, 100, 2)}) {
    const Sums<T> exact(random_integers<T>(count, 8), before, rows, columns);
    CHECK(exact.actual == exact.expected);
    const Sums<T> close(random_values<T>(count), before, rows, columns);
    // In a chain of n terms of random sign, addition i rounds a sum of size √i by 3.4e-8 of it (the root-mean-square),
    // together 3.4e-8·√(n/2) of √n. The chains: 64 rows, the partial sums of a thread, the threads of a column. Five times
    // that for the worst of all columns. (With 100 to begin with, the last addition rounds 100 by 3.4e-8 of it.)
    const int partials = ceil_div(rows, column_sum_rows);
    const double chains = std::min(rows, column_sum_rows) + ceil_div(partials, column_sum_parts) + column_sum_parts;
    CHECK_CLOSE(close.actual, close.expected, std::sqrt(double(rows)) + (before.empty() ? 0 : 100), 5 * 3.4e-8 * std::sqrt(chains / 2));
  }
}

}  // namespace

TEST_CASE_TEMPLATE("column sums", T, float, __nv_bfloat16, __half) {
  check<T>(1, 51);
  check<T>(63, 211);
  check<T>(64, 64);
  check<T>(65, 1040);         // two partial sums, and several blocks a row of the grid
  check<T>(130, 12);          // packs of 16 bytes in float only
  check<T>(130, 48);          // packs of 64 bytes in float only
  check<T>(64 * 64, 32);
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check<T>(64 * 64 + 1, 51);
  check<T>(64 * 64 * 64 + 1, 3);
}
