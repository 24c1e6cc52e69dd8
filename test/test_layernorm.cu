// LayerNorm and the residual addition before it, forward and backward, against float64.
#include "kernels/layernorm.cuh"
#include "kernels/residual.cuh"
#include "test/kernel_test.cuh"

namespace {

using Numbers = std::vector<double>;

struct Forward {
  Numbers mean, rstd, normed, out;  // (rows), (rows), (rows, C), (rows, C)
};

Forward forward_reference(const Numbers& x, const Numbers& weight, const Numbers& bias, int rows,
                          int channels) {
  Forward f{Numbers(rows), Numbers(rows), Numbers(x.size()), Numbers(x.size())};
  for (int r = 0; r < rows; ++r) {
    const double* row = &x[size_t(r) * channels];
    double variance = 0;
    for (int c = 0; c < channels; ++c) f.mean[r] += row[c] / channels;
    for (int c = 0; c < channels; ++c) variance += (row[c] - f.mean[r]) * (row[c] - f.mean[r]) / channels;
    f.rstd[r] = 1 / std::sqrt(variance + 1e-5);
    for (int c = 0; c < channels; ++c) {
      const size_t i = size_t(r) * channels + c;
      f.normed[i] = (row[c] - f.mean[r]) * f.rstd[r];
      f.out[i] = f.normed[i] * weight[c] + bias[c];
    }
  }
  return f;
}

// Adds to dx, dweight and dbias. ∂n_j/∂x_i = rstd·([i=j] − 1/C − n_i·n_j/C), times dout_j·weight_j, over j.
void add_backward_reference(Numbers& dx, Numbers& dweight, Numbers& dbias, const Forward& f,
                            const Numbers& dout, const Numbers& weight, int rows, int channels) {
  for (int r = 0; r < rows; ++r) {
    const size_t first = size_t(r) * channels;
    double sum_g = 0, sum_gn = 0;
    for (int c = 0; c < channels; ++c) {
      sum_g += dout[first + c] * weight[c];
      sum_gn += dout[first + c] * weight[c] * f.normed[first + c];
    }
    for (int c = 0; c < channels; ++c) {
      const size_t i = first + c;
      dx[i] += f.rstd[r] * (dout[i] * weight[c] - (sum_g + f.normed[i] * sum_gn) / channels);
      dweight[c] += dout[i] * f.normed[i];
      dbias[c] += dout[i];
    }
  }
}

template <class T>
struct Inputs {
  Inputs(int rows, int channels)
      : residual(random_values<T>(size_t(rows) * channels, 2, 3)),  // the mean exceeds the deviation
        branch(random_values<T>(size_t(rows) * channels, 1, 0, 2)),
        weight(random_values<T>(channels, 0.3, 1, 3)),
        bias(random_values<T>(channels, 0.5, 0, 4)),
        sum(residual) {
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] = from_float<T>(to_float(residual[i]) + to_float(branch[i]));
  }
  std::vector<T> residual, branch, weight, bias, sum;
};

// Deviations from the mean carry the roundings of values of size 5, and statistics the roundings of sums over C: about
// 1e-6 of a row's deviation. Then comes one rounding to T.
constexpr double float_error = 2e-6;

// In sanitizers' builds the compiler may not reorder additions. On the CPU device one thread then adds up a row in order: C
// roundings of sums that are half of the whole on average.
#ifdef __ASSOCIATIVE_MATH__
constexpr bool adds_in_order = false;
#else
constexpr bool adds_in_order = row_lanes == 1;
#endif
constexpr double error_of_row(int channels) { return float_error + (adds_in_order ? channels * 0x1p-25 : 0); }

template <class T>
void check_forward(int rows, int channels, bool add_branch, bool in_place) {
  CAPTURE(add_branch);
  const Inputs<T> in(rows, channels);
  const std::vector<T>& normed = add_branch ? in.sum : in.residual;
  const Forward expected =
      forward_reference(as_double(normed), as_double(in.weight), as_double(in.bias), rows, channels);
  Buffer<T> residual(in.residual), branch(in.branch), weight(in.weight), bias(in.bias);
  Buffer<T> separate_sum(in.sum.size()), out(in.sum.size());
  Buffer<float> mean(rows), rstd(rows);
  Buffer<T>& sum = in_place ? residual : separate_sum;
  residual_layernorm_forward<T>(out, sum, mean, rstd, residual, add_branch ? branch.data() : nullptr, weight,
                                bias, rows, channels, test_stream());
  if (add_branch) CHECK(same_bits(sum.get(), in.sum));
  CHECK_CLOSE(mean.numbers(), expected.mean, 1.0, float_error);
  CHECK_CLOSE(rstd.numbers(), expected.rstd, 0.0, float_error);
  CHECK_CLOSE(out.numbers(), expected.out, 1.0, error_of_row(channels) + rounding<T>);
}

template <class T>
void check_backward(int rows, int channels, bool accumulate) {
  CAPTURE(accumulate);
  const Inputs<T> in(rows, channels);
  const auto dout_values = random_values<T>(in.sum.size(), 1, 0, 5);
  const auto dsum_before = random_values<T>(in.sum.size());
  const auto dweight_before = random_values<float>(channels, 1, 0, 6);
  const auto dbias_before = random_values<float>(channels);
  const Numbers weights = as_double(in.weight);
  const Forward forward = forward_reference(as_double(in.sum), weights, as_double(in.bias), rows, channels);
  Numbers dx = as_double(dsum_before), dw = as_double(dweight_before), db = as_double(dbias_before);
  if (!accumulate) dw.assign(channels, 0), db.assign(channels, 0);
  add_backward_reference(dx, dw, db, forward, as_double(dout_values), weights, rows, channels);

  Buffer<T> dsum(dsum_before), dout(dout_values), residual(in.sum), weight(in.weight);
  Buffer<float> mean(std::vector<float>(forward.mean.begin(), forward.mean.end()));
  Buffer<float> rstd(std::vector<float>(forward.rstd.begin(), forward.rstd.end()));
  Buffer<float> dweight(channels), dbias(channels), workspace(layernorm_workspace(rows, channels));
  if (accumulate) dweight = dweight_before, dbias = dbias_before;
  layernorm_backward<T>(dsum, dweight, dbias, dout, residual, weight, mean, rstd, rows, channels,
                        accumulate, workspace, test_stream());
  CHECK_CLOSE(dsum.numbers(), dx, 1.0, 2 * float_error + rounding<T>);
  // Sums over the rows of terms of size 1 that cancel to about √rows.
  CHECK_CLOSE(dweight.numbers(), dw, std::sqrt(double(rows)), float_error);
  CHECK_CLOSE(dbias.numbers(), db, std::sqrt(double(rows)), float_error);
}

template <class T>
void check(int rows, int channels) {
  CAPTURE(rows);
  CAPTURE(channels);
  check_forward<T>(rows, channels, true, false);
  check_forward<T>(rows, channels, true, true);
  check_forward<T>(rows, channels, false, false);
  check_backward<T>(rows, channels, false);
  check_backward<T>(rows, channels, true);
}

}  // namespace

TEST_CASE_TEMPLATE("layernorm forward and backward", T, float, __nv_bfloat16, __half) {
  check<T>(1, 51);     // one row, packs of one element
  check<T>(32, 64);    // exactly one block of backward
  check<T>(37, 211);   // a second block of five rows
  check<T>(35, 256);   // on a GPU several warps a row, rows by two and an odd one
  check<T>(6, 768);
  check<T>(5, 2056);   // more packs than threads
  if (large_shapes) check<T>(2100, 32);  // 66 blocks: their partial sums take two levels to add
}

// Pipeline stages rely on it: what one sends to the next is what LayerNorm would have added up.
TEST_CASE_TEMPLATE("a residual addition has the bits of that before LayerNorm", T, float, __nv_bfloat16, __half) {
  for (const auto& [rows, channels] : {std::pair(1, 1), std::pair(3, 51), std::pair(7, 204), std::pair(5, 1024)}) {
    CAPTURE(channels);
    const Inputs<T> in(rows, channels);
    Buffer<T> residual(in.residual), branch(in.branch), out(in.sum.size());
    residual_forward<T>(out, residual, branch, rows, channels, test_stream());
    const std::vector<T> actual = out.get();
    CHECK(std::memcmp(actual.data(), in.sum.data(), actual.size() * sizeof(T)) == 0);
  }
}
