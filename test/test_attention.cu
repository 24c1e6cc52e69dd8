// Attention against a float64 computation that stores every matrix.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "kernels/attention.cuh"
#include "test/kernel_test.cuh"

namespace {

struct Shape {
  int batch, seq_len, heads, head_size;
};

struct Reference {
  std::vector<double> out, lse, dqkv;
};

Reference reference(const std::vector<double>& qkv, const std::vector<double>& dout, const Shape& s) {
  const int T = s.seq_len, H = s.head_size, C = s.heads * H;
  Reference r{std::vector<double>(size_t(s.batch) * T * C), std::vector<double>(size_t(s.batch) * s.heads * T),
              std::vector<double>(qkv.size())};
  const double scale = 1 / std::sqrt(double(H));
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.heads; ++h)
      for (int t = 0; t < T; ++t) {
        const size_t row = size_t(b) * T + t;
        auto at = [&](int t2, int part) { return (size_t(b) * T + t2) * 3 * C + part * C + h * H; };
        const size_t q = at(t, 0), o = row * C + h * H;
        std::vector<double> p(t + 1), dp(t + 1);
        double sum = 0, dot = 0;
        for (int j = 0; j <= t; ++j) {
          for (int d = 0; d < H; ++d) p[j] += scale * qkv[q + d] * qkv[at(j, 1) + d];
          p[j] = std::exp(p[j]);
          sum += p[j];
        }
        r.lse[(size_t(b) * s.heads + h) * T + t] = std::log(sum);
        for (int j = 0; j <= t; ++j) {
          p[j] /= sum;
          for (int d = 0; d < H; ++d) {
            r.out[o + d] += p[j] * qkv[at(j, 2) + d];
            dp[j] += dout[o + d] * qkv[at(j, 2) + d];
            r.dqkv[at(j, 2) + d] += p[j] * dout[o + d];
          }
          dot += p[j] * dp[j];
        }
        for (int j = 0; j <= t; ++j)
          for (int d = 0; d < H; ++d) {
            const double ds = p[j] * (dp[j] - dot) * scale;
            r.dqkv[q + d] += ds * qkv[at(j, 1) + d];
            r.dqkv[at(j, 1) + d] += ds * qkv[q + d];
          }
      }
  return r;
}

template <class T>
void check(const Shape& s) {
  CAPTURE(s.seq_len);
  CAPTURE(s.head_size);
  const size_t rows = size_t(s.batch) * s.seq_len, channels = size_t(s.heads) * s.head_size;
  auto qkv = random_values<T>(rows * 3 * channels), dout = random_values<T>(rows * channels, 1, 0, 2);
  Reference expected = reference(as_double(qkv), as_double(dout), s);
  Buffer<T> qkv_d(qkv), dout_d(dout), out(rows * channels), dqkv(rows * 3 * channels);
  Buffer<float> lse(rows * s.heads), row_dots(rows * s.heads);
  attention_forward<T>(out, lse, qkv_d, s.batch, s.seq_len, s.heads, s.head_size, test_stream());
  attention_backward<T>(dqkv, row_dots, dout_d, out, qkv_d, lse, s.batch, s.seq_len, s.heads, s.head_size,
                        test_stream());
  // Float arithmetic on sums of up to T and HS terms of size about 1, then one rounding to T. The backward pass reads
  // `out` rounded to T: D = Σ dO·O is off by √HS roundings of it.
  const double f = 2e-6 * std::sqrt(double(s.seq_len)) + 1e-6 * std::sqrt(double(s.head_size));
  CHECK_CLOSE(lse.numbers(), expected.lse, 1.0, f);
  CHECK_CLOSE(out.numbers(), expected.out, 1.0, f + rounding<T>);
  CHECK_CLOSE(dqkv.numbers(), expected.dqkv, 1.0, 4 * f + rounding<T> * (1 + std::sqrt(double(s.head_size))));
}

}  // namespace

TEST_CASE_TEMPLATE("attention forward and backward", T, float, __nv_bfloat16, __half) {
  check<T>({2, 64, 2, 64});   // one full tile of queries
  check<T>({1, 1, 1, 16});    // a single token
  check<T>({2, 37, 3, 17});   // odd everything: packs of one element, partial tiles
  check<T>({1, 130, 2, 32});  // three blocks, the last of two rows
  check<T>({1, 96, 1, 80});   // head size padded to 128
  check<T>({1, 65, 2, 128});
}
