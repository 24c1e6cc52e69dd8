// Attention against a float64 computation that stores every matrix.
#include "kernels/attention.cuh"
#include "test/attention_reference.h"
#include "test/kernel_test.cuh"

namespace {

using Shape = AttentionShape;

// Largest |actual − expected| in units of what is allowed: `relative` of the element's terms and `absolute`.
double worst_excess(const std::vector<double>& actual, const std::vector<double>& expected,
                    const std::vector<double>& terms, double relative, double absolute) {
  REQUIRE(actual.size() == expected.size());
  double worst = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - expected[i]) / (relative * terms[i] + absolute);
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  }
  return worst;
}

// Which body: the one that attention_forward and attention_backward choose of our own, that for tensor cores, which the
// CPU device emulates, or the library's.
enum class Body { chosen, tensor_cores, library };

struct Results {
  std::vector<double> out, lse, dqkv;
};

template <class T>
Results run(const Shape& s, Body body, const std::vector<T>& qkv, const std::vector<T>& dout) {
  const size_t statistics = size_t(s.batch) * s.heads * s.seq_len;
  Buffer<T> qkv_d(qkv), dout_d(dout), out(dout.size()), dqkv(qkv.size());
  Buffer<float> lse(statistics), row_dots(statistics);
  auto with_sizes = [&](auto launch) { launch(s.batch, s.seq_len, s.heads, s.head_size, test_stream()); };
  if (body != Body::tensor_cores) {
    CHECK(attention_is_planned<T>(s.batch, s.seq_len, s.heads, s.head_size) == (body == Body::library));
    with_sizes([&](auto... sizes) { attention_forward<T>(out, lse, qkv_d, sizes...); });
    with_sizes([&](auto... sizes) { attention_backward<T>(dqkv, row_dots, dout_d, out, qkv_d, lse, sizes...); });
  } else if constexpr (sizeof(T) == 2) {
    with_sizes([&](auto... sizes) { flash_attention_forward<T>(out, lse, qkv_d, sizes...); });
    with_sizes([&](auto... sizes) { flash_attention_backward<T>(dqkv, row_dots, dout_d, out, qkv_d, lse, sizes...); });
  }
  return {out.numbers(), lse.numbers(), dqkv.numbers()};
}

template <class T>
void check(const Shape& s, Body body) {
  CAPTURE(s.seq_len);
  CAPTURE(s.head_size);
  const size_t rows = size_t(s.batch) * s.seq_len, channels = size_t(s.heads) * s.head_size;
  const auto qkv = random_values<T>(rows * 3 * channels), dout = random_values<T>(rows * channels, 1, 0, 2);
  const AttentionReference expected = attention_reference(as_double(qkv), as_double(dout), s);
  const Results r = run(s, body, qkv, dout);
  // Float sums of T and HS terms of random sign: √T and √HS roundings of 6e-8, three times that for the worst of all
  // elements, five times for products of HS, which tensor cores cut instead of rounding. Then the roundings of P, dS and
  // results to T: at most u of the element's terms. Backward repeats the forward pass and has three more such sums.
  const double f = 2e-7 * std::sqrt(double(s.seq_len)) + 3e-7 * std::sqrt(double(s.head_size)), u = rounding<T>;
  CHECK_CLOSE(r.lse, expected.lse, 1.0, f);
  CHECK_WITHIN("out", worst_excess(r.out, expected.out, expected.out_terms, u + f, f), 1);
  CHECK_WITHIN("dqkv", worst_excess(r.dqkv, expected.dqkv, expected.dqkv_terms, u + 4 * f, 4 * f), 1);
}

// A number that is not finite, in q, k, v or dout (part 0 to 3), shows in what depends on it, and in no other head.
template <class T>
void check_non_finite(const Shape& s, Body body, float value, int part) {
  CAPTURE(value);
  CAPTURE(part);
  const size_t rows = size_t(s.batch) * s.seq_len, channels = size_t(s.heads) * s.head_size;
  const size_t row = s.seq_len / 2, element = 3;  // of head 0
  auto qkv = random_values<T>(rows * 3 * channels), dout = random_values<T>(rows * channels, 1, 0, 2);
  T& broken = part < 3 ? qkv[(row * 3 + part) * channels + element] : dout[row * channels + element];
  broken = from_float<T>(value);
  const Results r = run(s, body, qkv, dout);
  CHECK(std::isfinite(r.out[row * channels + element]) == (part == 3));
  CHECK(!std::isfinite(r.dqkv[row * 3 * channels + element]));
  auto is_broken = [&](const std::vector<double>& values, size_t i) {
    return i % channels >= size_t(s.head_size) && !std::isfinite(values[i]);
  };
  size_t elsewhere = 0;
  for (size_t i = 0; i < r.out.size(); ++i) elsewhere += is_broken(r.out, i);
  for (size_t i = 0; i < r.dqkv.size(); ++i) elsewhere += is_broken(r.dqkv, i);
  CHECK(elsewhere == 0);
}

}  // namespace

TEST_CASE_TEMPLATE("attention forward and backward", T, float, __nv_bfloat16, __half) {
  check<T>({2, 64, 2, 64}, Body::chosen);   // one full tile of queries
  check<T>({1, 1, 1, 16}, Body::chosen);    // a single token
  check<T>({2, 37, 3, 17}, Body::chosen);   // odd everything: packs of one element, partial tiles
  check<T>({1, 130, 2, 32}, Body::chosen);  // three blocks, the last of two rows
  check<T>({1, 96, 1, 80}, Body::chosen);   // head size padded to 128
  check<T>({1, 65, 2, 128}, Body::chosen);
}

TEST_CASE_TEMPLATE("attention on tensor cores", T, __nv_bfloat16, __half) {
  for (int head_size : {64, 128}) {
    check<T>({2, 15, 2, head_size}, Body::tensor_cores);   // less than a warp's rows
    check<T>({1, 129, 2, head_size}, Body::tensor_cores);  // a row more than the largest block
    if (!large_shapes) continue;
    check<T>({1, 1, 1, head_size}, Body::tensor_cores);   // a single token
    check<T>({1, 64, 1, head_size}, Body::tensor_cores);  // half of the largest block, or all of the smallest
    check<T>({1, 65, 2, head_size}, Body::tensor_cores);
    check<T>({2, 200, 3, head_size}, Body::tensor_cores);
  }
  check<T>({2, 37, 3, 8}, Body::tensor_cores);  // head sizes that are padded
  check<T>({1, 70, 2, 40}, Body::tensor_cores);
  check<T>({1, 50, 2, 80}, Body::tensor_cores);
}

template <int HS>
void check_banks() {
  for (int row = 0; row < 64; row += 8)
    for (int chunk = 0; chunk < HS / 8; ++chunk) {
      int seen = 0;  // a bit for each 16 bytes of the 128 that the banks are wide
      for (int r = row; r < row + 8; ++r) seen |= 1 << swizzled<HS>(r, chunk) / 8 % 8;
      CHECK(seen == 0xff);
    }
}

TEST_CASE("eight rows of a tile's chunk share no bank of shared memory") {
  check_banks<64>();
  check_banks<128>();
}

TEST_CASE_TEMPLATE("attention: infinity and NaN come through", T, __nv_bfloat16, __half) {
  if (!large_shapes) return;
  for (Body body : {Body::chosen, Body::tensor_cores})
    for (float value : {float(INFINITY), float(NAN)})
      for (int part : {0, 1, 2, 3}) check_non_finite<T>({1, 70, 2, 64}, body, value, part);
}

// Whether the library is there and does this shape, as it will from then on: these tests are the last.
template <class T>
bool plan(const Shape& s) {
  if (!has_library_attention) return false;
  const std::string problem = plan_attention<T>(s.batch, s.seq_len, s.heads, s.head_size);
  if (!problem.empty()) MESSAGE("left out: T ", s.seq_len, ", head size ", s.head_size, ": ", problem);
  return problem.empty();
}

TEST_CASE_TEMPLATE("attention by a library", T, __nv_bfloat16, __half) {
  for (const Shape& s : {Shape{2, 128, 2, 64}, {1, 256, 3, 128}, {2, 200, 3, 64}, {1, 129, 2, 128}, {2, 37, 3, 8},
                         {1, 70, 2, 40}, {1, 50, 2, 80}, {1, 1, 1, 64}})
    if (plan<T>(s)) check<T>(s, Body::library);
}

TEST_CASE("attention by a library: where there is one, it does gpt2's shape") {
  if (has_library_attention) CHECK(plan<__nv_bfloat16>({2, 1024, 12, 64}));
  CHECK_FALSE(plan_attention<float>(2, 1024, 12, 64).empty());
  CHECK_FALSE(attention_is_planned<float>(2, 1024, 12, 64));
}

TEST_CASE_TEMPLATE("attention by a library: infinity and NaN come through", T, __nv_bfloat16, __half) {
  const Shape s = {1, 72, 2, 64};
  if (!plan<T>(s)) return;
  for (float value : {float(INFINITY), float(NAN)})
    for (int part : {0, 1, 2, 3}) check_non_finite<T>(s, Body::library, value, part);
}

TEST_CASE_TEMPLATE("attention by a library: the same bits each time", T, __nv_bfloat16, __half) {
  const Shape s = {4, 512, 4, 64};
  if (!plan<T>(s)) return;
  const size_t elements = size_t(s.batch) * s.seq_len * s.heads * s.head_size;
  const auto qkv = random_values<T>(3 * elements), dout = random_values<T>(elements, 1, 0, 2);
  const Results first = run(s, Body::library, qkv, dout);
  for (int i = 0; i < 5; ++i) {
    const Results again = run(s, Body::library, qkv, dout);
    CHECK(again.out == first.out);
    CHECK(again.lse == first.lse);
    CHECK(again.dqkv == first.dqkv);
  }
}
