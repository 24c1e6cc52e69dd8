// Attention of one token over a cache of keys and values against float64, and the cache itself.
#include "kernels/decode_attention.cuh"
#include "test/kernel_test.cuh"

namespace {

struct Shape {
  int batch, heads, head_size, positions;
};

// A cache whose rows from `keys` on are NaN: nobody may read them.
template <class T>
struct Cache {
  Cache(const Shape& s, int keys) : k(filled(s, keys, 5)), v(filled(s, keys, 6)), keys_d(k), values_d(v) {}

  static std::vector<T> filled(const Shape& s, int keys, int seed) {
    std::vector<T> all = random_values<T>(size_t(s.batch) * s.heads * s.positions * s.head_size, 1, 0, seed);
    for (size_t i = 0; i < all.size(); ++i)
      if (int(i / size_t(s.head_size) % size_t(s.positions)) >= keys) all[i] = from_float<T>(NAN);
    return all;
  }
  KeyValueCache<T> view(const Shape& s) { return {keys_d.data(), values_d.data(), s.positions}; }

  std::vector<T> k, v;
  Buffer<T> keys_d, values_d;
};

template <class T>
void check(const Shape& s, int keys) {
  CAPTURE(s.head_size);
  CAPTURE(keys);
  const int C = s.heads * s.head_size;
  const std::vector<T> qkv = random_values<T>(size_t(s.batch) * 3 * C);
  Cache<T> cache(s, keys);
  std::vector<double> expected(size_t(s.batch) * C), terms(expected.size());
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.heads; ++h) {
      std::vector<double> p(static_cast<size_t>(keys));
      const auto in_cache = [&](int j, int d) { return ((size_t(b) * s.heads + h) * s.positions + j) * s.head_size + d; };
      double sum = 0;
      for (int j = 0; j < keys; ++j) {
        double score = 0;
        for (int d = 0; d < s.head_size; ++d)
          score += double(to_float(qkv[size_t(b) * 3 * C + h * s.head_size + d])) * to_float(cache.k[in_cache(j, d)]);
        sum += p[size_t(j)] = std::exp(score / std::sqrt(double(s.head_size)));
      }
      for (int d = 0; d < s.head_size; ++d)
        for (int j = 0; j < keys; ++j) {
          const double term = p[size_t(j)] / sum * to_float(cache.v[in_cache(j, d)]);
          expected[size_t(b) * C + h * s.head_size + d] += term;
          terms[size_t(b) * C + h * s.head_size + d] += std::abs(term);
        }
    }
  Buffer<T> qkv_d(qkv), out(expected.size());
  Buffer<float> workspace(decode_workspace(s.batch, s.positions, s.heads, s.head_size));
  decode_attention<T>(out, qkv_d, cache.view(s), s.batch, keys, s.heads, s.head_size, workspace, test_stream());
  // As in test_attention: float sums of `keys` and HS terms of random sign, then one rounding of the result.
  const double f = 2e-7 * std::sqrt(double(keys)) + 3e-7 * std::sqrt(double(s.head_size));
  const std::vector<double> actual = out.numbers();
  double worst = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - expected[i]) / (rounding<T> * std::abs(expected[i]) + f * terms[i] + f);
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  }
  CHECK_WITHIN("out", worst, 1);
}

}  // namespace

TEST_CASE_TEMPLATE("attention of one token over the cache", T, float, __nv_bfloat16, __half) {
  for (int keys : {1, 2, decode_keys - 1, decode_keys, decode_keys + 1, 2 * decode_keys, 1000}) check<T>({2, 3, 64, 1000}, keys);
  for (int head_size : {16, 17, 32, 80, 128}) check<T>({1, 2, head_size, 300}, 299);
}

TEST_CASE_TEMPLATE("keys and values go to their positions, and nowhere else", T, float, __nv_bfloat16) {
  for (const Shape& s : {Shape{3, 2, 16, 11}, Shape{2, 3, 17, 9}}) {
    const int C = s.heads * s.head_size, seq_len = 4, first = 5;
    const std::vector<T> qkv = random_values<T>(size_t(s.batch) * seq_len * 3 * C);
    Cache<T> cache(s, s.positions);
    append_to_cache<T>(cache.view(s), Buffer<T>(qkv), s.batch, seq_len, s.heads, s.head_size, first, test_stream());
    CUDA_CHECK(cudaStreamSynchronize(test_stream()));
    for (int b = 0; b < s.batch; ++b)
      for (int t = 0; t < seq_len; ++t)
        for (int c = 0; c < C; ++c) {
          const int head = c / s.head_size, position = first + t;
          const size_t to = ((size_t(b) * s.heads + head) * s.positions + position) * s.head_size + c % s.head_size;
          const size_t from = (size_t(b) * seq_len + t) * 3 * C + c;
          cache.k[to] = qkv[from + C];
          cache.v[to] = qkv[from + 2 * C];
        }
    CHECK(same_bits(cache.keys_d.get(), cache.k));
    CHECK(same_bits(cache.values_d.get(), cache.v));
  }
}
