// Factors of low rank against float64 on the host: products, orthonormal rows, and what is left out.
#include "extensions/compression/kernels/low_rank.cuh"
#include "test/kernel_test.cuh"

namespace {

using Values = std::vector<float>;
using Doubles = std::vector<double>;

struct Shape {
  int rows, columns, rank;
  size_t all() const { return size_t(rows) * size_t(columns); }
};
// Rows and columns that divide nothing, more ranks than are multiplied at once, and the largest rank.
const std::vector<Shape> shapes = {{1, 1, 1}, {7, 5, 2}, {33, 64, 4}, {51, 153, 8}, {204, 51, 9}, {300, 70, 64}, {64, 1000, 3}};

// Σ_i a[i·step_a] · b[i·step_b]
double dot(const float* a, size_t step_a, const float* b, size_t step_b, int count) {
  double sum = 0;
  for (size_t i = 0; i < size_t(count); ++i) sum += double(a[i * step_a]) * b[i * step_b];
  return sum;
}
double length(const float* a, size_t step, int count) { return std::sqrt(dot(a, step, a, step, count)); }

Values orthonormal(const Values& p, int rows, int rank) {
  Buffer<float> buffer(p);
  orthonormalize(buffer, rows, rank, test_stream());
  return buffer.get();
}

// How far the rows' dot products are from those of orthonormal rows; rows of zeros are left out.
double skewness(const Values& p, int rows, int rank) {
  double worst = 0;
  const auto row = [&](int k) { return &p[size_t(k) * size_t(rows)]; };
  for (int j = 0; j < rank; ++j)
    for (int k = 0; k <= j; ++k)
      if (length(row(j), 1, rows) > 0 && length(row(k), 1, rows) > 0)
        worst = std::max(worst, std::abs(dot(row(j), 1, row(k), 1, rows) - (j == k)));
  return worst;
}
int zero_rows(const Values& p, int rows, int rank) {
  int zeros = 0;
  for (int k = 0; k < rank; ++k) zeros += length(&p[size_t(k) * size_t(rows)], 1, rows) == 0;
  return zeros;
}

// A row of length 1 is rounded to float twice, before it is scaled and then: 2^-24 of it each time. A dot product has two
// rows.
constexpr double orthonormal_bound = 0x1p-22;

}  // namespace

// A sum over columns has columns/32 terms on each thread and 32 of these: each addition rounds, at most 2^-24 of the sum of
// magnitudes, which is at most the product of lengths; so does each product, and so has M + error · unit before.
TEST_CASE("P is the product of Q and the matrix with its errors, which the matrix then has") {
  for (const Shape& s : shapes)
    for (bool with_errors : {false, true}) {
      CAPTURE(s.rows);
      CAPTURE(s.columns);
      constexpr float unit = 1024;
      const Values before = random_values<float>(s.all(), unit), left = random_values<float>(s.all(), 0.5, 0, 2), q = random_values<float>(size_t(s.rank * s.columns), 1, 0, 3);
      Buffer<float> matrix(before), errors(left), factors(q), p(size_t(s.rank * s.rows)), scale(Values{unit});
      project_rows(p, matrix, with_errors ? errors.data() : nullptr, scale, factors, s.rows, s.columns, s.rank, test_stream());
      const Values after = matrix.get(), products = p.get();
      double worst = 0, worst_sum = 0;
      for (size_t i = 0; i < s.all(); ++i) {
        const double wanted = before[i] + (with_errors ? double(left[i]) * unit : 0);
        worst_sum = std::max(worst_sum, std::abs(after[i] - wanted) / (std::abs(before[i]) + unit * std::abs(left[i])));
      }
      for (int k = 0; k < s.rank; ++k)
        for (int row = 0; row < s.rows; ++row) {
          const float *const x = &after[size_t(row * s.columns)], *const y = &q[size_t(k * s.columns)];
          const double error = std::abs(products[size_t(k * s.rows + row)] - dot(x, 1, y, 1, s.columns));
          worst = std::max(worst, error / (length(x, 1, s.columns) * length(y, 1, s.columns)));
        }
      CHECK_WITHIN("matrix", worst_sum, 0x1p-23);
      CHECK_WITHIN("P", worst, (s.columns / 32 + 34) * 0x1p-24);
      CHECK(same_bits(errors.get(), left));
    }
}

// As above, with rows/8 terms on each thread and 8 of these.
TEST_CASE("Q is the product of P and the matrix") {
  for (const Shape& s : shapes) {
    CAPTURE(s.rows);
    CAPTURE(s.columns);
    const Values m = random_values<float>(s.all()), p = random_values<float>(size_t(s.rank * s.rows), 1, 0, 2);
    Buffer<float> matrix(m), factors(p), q(size_t(s.rank * s.columns));
    project_columns(q, factors, matrix, s.rows, s.columns, s.rank, test_stream());
    const Values products = q.get();
    double worst = 0;
    for (int k = 0; k < s.rank; ++k)
      for (int column = 0; column < s.columns; ++column) {
        const float *const x = &m[size_t(column)], *const y = &p[size_t(k * s.rows)];
        const double error = std::abs(products[size_t(k * s.columns + column)] - dot(x, size_t(s.columns), y, 1, s.rows));
        worst = std::max(worst, error / (length(x, size_t(s.columns), s.rows) * length(y, 1, s.rows)));
      }
    CHECK_WITHIN("Q", worst, (s.rows / 8 + 10) * 0x1p-24);
  }
}

// The sum of R products is rounded 2R times at most. M − x/N and the quotient are rounded once each, and the sum of both is
// M again: 2^-23 of the larger.
TEST_CASE("the product of both factors is restored, and the error is what it leaves out of this rank's part") {
  for (const Shape& s : shapes)
    for (int ranks : {2, 3}) {
      CAPTURE(s.rows);
      CAPTURE(s.columns);
      constexpr float unit = 64;
      const Values m = random_values<float>(s.all(), unit), p = random_values<float>(size_t(s.rank * s.rows), 1, 0, 2), q = random_values<float>(size_t(s.rank * s.columns), unit, 0, 3);
      Buffer<float> matrix(m), errors(s.all()), of_rows(p), of_columns(q), scale(Values{unit}), again(m);
      restore(matrix, errors, scale, of_rows, of_columns, s.rows, s.columns, s.rank, ranks, test_stream());
      restore(again, nullptr, scale, of_rows, of_columns, s.rows, s.columns, s.rank, ranks, test_stream());
      const Values x = matrix.get(), left = errors.get();
      CHECK(same_bits(again.get(), x));
      double worst = 0, worst_error = 0;
      for (size_t i = 0; i < s.all(); ++i) {
        const float *const a = &p[i / size_t(s.columns)], *const b = &q[i % size_t(s.columns)];
        const double wanted = dot(a, size_t(s.rows), b, size_t(s.columns), s.rank);
        worst = std::max(worst, std::abs(x[i] - wanted) / (length(a, size_t(s.rows), s.rank) * length(b, size_t(s.columns), s.rank)));
        worst_error = std::max(worst_error, std::abs(double(x[i]) / ranks + double(left[i]) * unit - m[i]) / (std::abs(m[i]) + std::abs(x[i])));
      }
      CHECK_WITHIN("restored", worst, 2 * s.rank * 0x1p-24);
      CHECK_WITHIN("error", worst_error, 0x1p-23);
    }
}

// Rows of neighbouring lengths that are nearly alike, and some that are very short: their squares are no floats.
TEST_CASE("rows become orthonormal, and span what they spanned") {
  for (const Shape& s : shapes)
    for (float size : {1.0f, 1e-30f, 1e15f}) {
      CAPTURE(s.rows);
      CAPTURE(size);
      const int rank = std::min(s.rank, s.rows);
      Values p = random_values<float>(size_t(rank * s.rows), size);
      const Values common = random_values<float>(size_t(s.rows), 1000 * size, 0, 2);
      for (size_t i = 0; i < p.size(); ++i) p[i] += common[i % size_t(s.rows)];
      const Values q = orthonormal(p, s.rows, rank);
      CHECK_WITHIN("orthonormal", skewness(q, s.rows, rank), orthonormal_bound);
      CHECK(zero_rows(q, s.rows, rank) == 0);
      // What of a row lies outside: it was rounded to float each time that rows before were taken from it, 2^-24 of its length.
      double outside = 0;
      for (int k = 0; k < rank; ++k) {
        Doubles rest(p.begin() + long(k * s.rows), p.begin() + long((k + 1) * s.rows));
        for (int turn = 0; turn < 2; ++turn)
          for (int j = 0; j <= k; ++j) {
            double along = 0;
            for (size_t i = 0; i < rest.size(); ++i) along += rest[i] * q[size_t(j * s.rows) + i];
            for (size_t i = 0; i < rest.size(); ++i) rest[i] -= along * q[size_t(j * s.rows) + i];
          }
        double square = 0;
        for (double x : rest) square += x * x;
        outside = std::max(outside, std::sqrt(square) / length(&p[size_t(k * s.rows)], 1, s.rows));
      }
      CHECK_WITHIN("span", outside, 3 * 0x1p-24);
    }
}

TEST_CASE("rows without a direction left become zero; what is not finite stays so") {
  constexpr int rows = 100, rank = 6;
  const Values a = random_values<float>(rows), b = random_values<float>(rows, 1, 0, 2);
  Values p(rows * rank);
  for (size_t i = 0; i < rows; ++i) {  // a, 3a, 0, b, a + b, a − b / 7
    const float values[rank] = {a[i], 3 * a[i], 0, b[i], a[i] + b[i], a[i] - b[i] / 7};
    for (size_t k = 0; k < rank; ++k) p[k * rows + i] = values[k];
  }
  const Values result = orthonormal(p, rows, rank);
  CHECK_WITHIN("orthonormal", skewness(result, rows, rank), orthonormal_bound);
  for (int k : {0, 3}) CHECK(length(&result[size_t(k * rows)], 1, rows) == about(1, 1e-6));
  for (int k : {2}) CHECK(length(&result[size_t(k * rows)], 1, rows) == 0);
  // Rows of which only two elements are not zero: two directions, and whatever is left is a rounding error.
  Values few(rows * rank);
  const Values random = random_values<float>(2 * rank, 1, 0, 3);
  for (size_t k = 0; k < rank; ++k) few[k * rows + 17] = random[2 * k], few[k * rows + 60] = random[2 * k + 1];
  const Values two = orthonormal(few, rows, rank);
  CHECK(zero_rows(two, rows, rank) == rank - 2);
  CHECK_WITHIN("two directions", skewness(two, rows, rank), orthonormal_bound);
  few[0] = NAN;
  const Values bad = orthonormal(few, rows, rank);
  CHECK(std::ranges::all_of(bad, [](float x) { return std::isnan(x); }));
}

// With as many directions as the matrix has, P is a rotation: what is restored is the matrix, but for dot products of P's
// rows that are off by 2^-22, R of them, and the roundings of three products.
TEST_CASE("with all directions nothing is left out; with the matrix's own rank neither") {
  for (const auto& [rows, columns, rank, of_matrix] : {std::array{48, 60, 48, 48}, {60, 48, 48, 48}, {90, 70, 5, 3}}) {
    CAPTURE(rows);
    CAPTURE(rank);
    const Values left = random_values<float>(size_t(rows * of_matrix)), right = random_values<float>(size_t(of_matrix * columns), 1, 0, 2);
    Values m(size_t(rows * columns));
    for (size_t i = 0; i < m.size(); ++i)
      m[i] = float(dot(&left[i / size_t(columns) * size_t(of_matrix)], 1, &right[i % size_t(columns)], size_t(columns), of_matrix));
    Buffer<float> matrix(m), errors(m.size()), p(size_t(rank * rows)), q(random_values<float>(size_t(rank * columns), 1, 0, 3)), scale(Values{1});
    project_rows(p, matrix, nullptr, scale, q, rows, columns, rank, test_stream());
    orthonormalize(p, rows, rank, test_stream());
    project_columns(q, p, matrix, rows, columns, rank, test_stream());
    restore(matrix, errors, scale, p, q, rows, columns, rank, 1, test_stream());
    const Values missing = errors.get();
    CHECK_WITHIN("left out", length(missing.data(), 1, rows * columns) / length(m.data(), 1, rows * columns), (4 * rank + rows / 8 + 10 + 2 * rank) * 0x1p-24);
  }
}

TEST_CASE("factors are replaced, but not by what no later product would come away from") {
  Buffer<float> factors(Values{1, 2, 3, 4, 5}), values(Values{7, 0, NAN, -INFINITY, -8});
  replace_factors(factors, values, 5, test_stream());
  CHECK(factors.get() == Values{7, 2, 3, 4, -8});
}
