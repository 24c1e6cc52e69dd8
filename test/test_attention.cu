// Attention against a float64 computation that stores every matrix.
#include "extensions/hopper/kernels/hopper_attention_backward.cuh"
#include "kernels/attention/attention.cuh"
#include "test/attention_reference.h"
#include "test/kernel_test.cuh"

namespace {

using Sizes = AttentionSizes;

const auto on_hopper = doctest::skip([] {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && !has_wgmma();  // without a device the tests say what is wrong
}());

// How the rows of a tensor lie in memory: in one of `parts` of each row, in one of `halves` of each sample, with a gap
// after each row.
struct Layout {
  int parts, halves, half, gap;
};
constexpr Layout alone{1, 1, 0, 0}, in_qkv{3, 1, 0, 0}, first_half{3, 2, 0, 0}, second_half{3, 2, 1, 0};
constexpr Layout spaced{1, 2, 1, 32}, unaligned{1, 1, 0, 1};

struct Layouts {
  Layout queries = in_qkv, keys = in_qkv, out = alone;
};

// A tensor (B, rows, C) as a part of device memory. All other memory is NaN: it shows if it is read, and if it is
// written.
template <class T>
class PlacedTensor {
 public:
  PlacedTensor(const Sizes& s, int rows, const Layout& layout, int part)
      : batch_(s.batch), rows_(rows), channels_(s.channels()), row_(layout.parts * channels_ + layout.gap),
        sample_(size_t(layout.halves) * rows * row_),
        first_(size_t(layout.half) * rows * row_ + (layout.parts == 1 ? 0 : part * channels_)),
        memory_(batch_ * sample_ + row_) {}

  template <class Float>
  Heads<Float> heads() const { return {memory_.data() + first_, {row_, int64_t(sample_)}}; }

  // set() copies from part `part` of a tensor (B, T, parts, C) of the host; add_to() adds to it.
  void set(const std::vector<T>& values, int seq_len, int parts, int part) {
    std::vector<T> memory = memory_.get();
    for_each_element(seq_len, parts, part, [&](size_t here, size_t there) { memory[here] = values[there]; });
    memory_ = memory;
  }
  void add_to(std::vector<double>& values, int seq_len, int parts, int part) const {
    std::vector<T> memory = memory_.get();
    const std::vector<T> nan(1, Buffer<T>(1).get()[0]);
    for_each_element(seq_len, parts, part, [&](size_t here, size_t there) {
      values[there] += double(to_float(memory[here]));
      memory[here] = nan[0];
    });
    CHECK(same_bits(memory, std::vector<T>(memory.size(), nan[0])));
  }

 private:
  template <class Function>
  void for_each_element(int seq_len, int parts, int part, Function function) const {
    for (int b = 0; b < batch_; ++b)
      for (int r = 0; r < rows_; ++r)
        for (int c = 0; c < channels_; ++c)
          function(first_ + b * sample_ + size_t(r) * row_ + c,
                   ((size_t(b) * seq_len + r) * parts + part) * channels_ + c);
  }

  int batch_, rows_, channels_, row_;
  size_t sample_, first_;
  Buffer<T> memory_;
};

// The implementation: the one of ours that attention_forward and attention_backward choose, the one for tensor cores,
// the one for Hopper (the CPU device emulates both), or the library's.
enum class Body { chosen, tensor_cores, hopper, library };

// As in test/attention_reference.h: qkv and dqkv have as many rows as queries or keys, whichever are more.
struct Results {
  std::vector<double> out, lse, dqkv;
};

int seq_len_of(const Sizes& s) { return std::max(s.queries, s.keys); }

template <class T, class Gradient = T>
Results run(const Sizes& s, Body body, const std::vector<T>& qkv, const std::vector<T>& dout, const Layouts& l = {}) {
  const int seq_len = seq_len_of(s);
  PlacedTensor<T> q(s, s.queries, l.queries, 0), k(s, s.keys, l.keys, 1), v(s, s.keys, l.keys, 2);
  PlacedTensor<T> out(s, s.queries, l.out, 0), d_out(s, s.queries, l.out, 0);
  PlacedTensor<Gradient> dq(s, s.queries, l.queries, 0), dk(s, s.keys, l.keys, 1), dv(s, s.keys, l.keys, 2);
  Buffer<float> lse(size_t(s.batch) * s.heads * s.queries), row_dots(lse.size());
  const Buffer<float> maxima(std::vector<float>(2));  // of out, and of dqkv
  float *const maximum = maxima.data(), *const of_gradients = maximum + 1;
  q.set(qkv, seq_len, 3, 0), k.set(qkv, seq_len, 3, 1), v.set(qkv, seq_len, 3, 2), d_out.set(dout, s.queries, 1, 0);

  const Heads<T> o = out.template heads<T>();
  const Heads<const T> o_in = out.template heads<const T>(), d_o = d_out.template heads<const T>();
  const QkvHeads<const T> x{q.template heads<const T>(), k.template heads<const T>(), v.template heads<const T>()};
  const QkvHeads<Gradient> dx{dq.template heads<Gradient>(), dk.template heads<Gradient>(),
                              dv.template heads<Gradient>()};
  if (body == Body::chosen || body == Body::library) {
    CHECK(attention_is_planned<T>(s, strides_of(x, o)) == (body == Body::library));
    attention_forward(o, lse.data(), x, s, test_stream(), {}, maximum);
    attention_backward(dx, row_dots.data(), d_o, o_in, x, lse.data(), s, test_stream(), {}, of_gradients);
  } else if constexpr (sizeof(T) == 2) {
    if (body == Body::hopper) {
      Buffer<float> workspace(hopper_attention_workspace(s));
      hopper_attention_forward(o, lse.data(), x, s, test_stream(), maximum);
      hopper_attention_backward(dx, row_dots.data(), workspace.data(), d_o, o_in, x, lse.data(), s, test_stream(), of_gradients);
      CUDA_CHECK(cudaStreamSynchronize(test_stream()));
    } else {
      flash_attention_forward(o, lse.data(), x, s, test_stream(), maximum);
      flash_attention_backward(dx, row_dots.data(), d_o, o_in, x, lse.data(), s, test_stream(), of_gradients);
    }
  }
  Results r{std::vector<double>(dout.size()), lse.numbers(), std::vector<double>(qkv.size())};
  out.add_to(r.out, s.queries, 1, 0);
  dq.add_to(r.dqkv, seq_len, 3, 0), dk.add_to(r.dqkv, seq_len, 3, 1), dv.add_to(r.dqkv, seq_len, 3, 2);
  if (!std::is_same_v<T, __nv_bfloat16> || body == Body::library) return r;  // which alone is cast to eight bits
  check_maximum(maxima.numbers()[0], r.out);
  if (std::is_same_v<T, Gradient>) check_maximum(maxima.numbers()[1], r.dqkv);
  return r;
}

template <class T>
struct Inputs {
  explicit Inputs(const Sizes& s)
      : qkv(random_values<T>(size_t(s.batch) * seq_len_of(s) * 3 * s.channels())),
        dout(random_values<T>(size_t(s.batch) * s.queries * s.channels(), 1, 0, 2)) {}
  AttentionReference reference(const Sizes& s) const { return attention_reference(as_double(qkv), as_double(dout), s); }
  std::vector<T> qkv, dout;
};

template <class T, class Gradient = T>
void check(const Sizes& s, Body body, const Layouts& layouts = {}) {
  CAPTURE(s.queries);
  CAPTURE(s.keys);
  CAPTURE(s.head_size);
  CAPTURE(s.causal);
  CAPTURE(s.past);
  const Inputs<T> inputs(s);
  const AttentionReference expected = inputs.reference(s);
  const Results r = run<T, Gradient>(s, body, inputs.qkv, inputs.dout, layouts);
  // The sums, and the roundings of P, dS and results to T: at most u of the element's terms. Backward repeats the
  // forward pass and has three more such sums.
  const double f = attention_sum_error(s), u = rounding<T>;
  CHECK_CLOSE(r.lse, expected.lse, 1.0, f);
  CHECK_WITHIN("out", worst_excess(r.out, expected.out, expected.out_terms, u + f, f), 1);
  CHECK_WITHIN("dqkv", worst_excess(r.dqkv, expected.dqkv, expected.dqkv_terms, u + 4 * f, 4 * f), 1);
}

Sizes square(int batch, int seq_len, int heads, int head_size) {
  return square_attention(batch, seq_len, heads, head_size);
}

// A number that is not finite, in q, k, v or dout (part 0 to 3), shows in what depends on it, and in no other head. (In k
// infinity has the sign of q's number: a key with a score of minus infinity takes no part, and leaves out finite.)
template <class T>
void check_non_finite(const Sizes& s, Body body, float value, int part) {
  CAPTURE(value);
  CAPTURE(part);
  const size_t channels = s.channels(), row = s.queries / 2, element = 3;  // of head 0
  auto [qkv, dout] = Inputs<T>(s);
  T& broken = part < 3 ? qkv[(row * 3 + part) * channels + element] : dout[row * channels + element];
  const float q = to_float(qkv[row * 3 * channels + element]);
  broken = from_float<T>(part == 1 ? std::copysign(value, q) : value);
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
  check<T>(square(2, 64, 2, 64), Body::chosen);   // one full tile of queries
  check<T>(square(1, 1, 1, 16), Body::chosen);    // a single token
  check<T>(square(2, 37, 3, 17), Body::chosen);   // odd everything: packs of one element, partial tiles
  check<T>(square(1, 130, 2, 32), Body::chosen);  // three blocks, the last of two rows
  check<T>(square(1, 96, 1, 80), Body::chosen);   // head size padded to 128
  check<T>(square(1, 65, 2, 128), Body::chosen);
}

TEST_CASE_TEMPLATE("attention on tensor cores", T, __nv_bfloat16, __half) {
  for (int head_size : {64, 128}) {
    check<T>(square(2, 15, 2, head_size), Body::tensor_cores);   // less than a warp's rows
    check<T>(square(1, 129, 2, head_size), Body::tensor_cores);  // a row more than the largest block
    if (!large_shapes) continue;
    check<T>(square(1, 1, 1, head_size), Body::tensor_cores);   // a single token
    check<T>(square(1, 64, 1, head_size), Body::tensor_cores);  // half of the largest block, or all of the smallest
    check<T>(square(1, 65, 2, head_size), Body::tensor_cores);
    check<T>(square(2, 200, 3, head_size), Body::tensor_cores);
  }
  check<T>(square(2, 37, 3, 8), Body::tensor_cores);  // head sizes that are padded
  check<T>(square(1, 70, 2, 40), Body::tensor_cores);
  check<T>(square(1, 50, 2, 80), Body::tensor_cores);
}

// Rectangles, whose rows lie in memory in any way. Sizes leave tails in tiles of 16, 32, 48 and 64.
TEST_CASE_TEMPLATE("attention of rectangles", T, float, __nv_bfloat16, __half) {
  const Body body = Body::chosen;
  const Layouts halves{second_half, first_half, alone}, cache{alone, spaced, spaced};
  check<T, float>({2, 37, 101, 1, 64, false}, body, cache);                   // fewer queries than keys
  check<T, float>({1, 37, 150, 1, 17}, body, {alone, unaligned, unaligned});  // nobody sees the last keys
  check<T>({2, 33, 33, 1, 64}, body, halves);
  check<T>({1, 20, 30, 1, 40, true, 50}, body);                               // all keys come before the first query
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check<T>({1, 1, 130, 2, 32, false}, body, cache);                           // one query
  check<T>({2, 70, 1, 2, 16, false}, body, cache);                            // one key
  check<T>({2, 70, 1, 2, 16}, body);
  check<T>({1, 101, 37, 1, 128, false}, body, halves);                        // fewer keys than queries
  check<T>({2, 101, 37, 2, 64}, body, {in_qkv, first_half, spaced});          // the last queries see all keys
  check<T>({2, 37, 101, 2, 64, true, 64}, body, cache);                       // behind a cache
  check<T, float>({1, 65, 100, 1, 80, true, 10}, body, cache);
  check<T>({1, 1, 77, 1, 128, true, 76}, body, {alone, unaligned, alone});
}

TEST_CASE_TEMPLATE("attention of rectangles on tensor cores", T, __nv_bfloat16, __half) {
  const Body body = Body::tensor_cores;
  const Layouts halves{second_half, first_half, alone}, cache{alone, spaced, spaced};
  check<T, float>({2, 37, 101, 1, 64, false}, body, cache);
  check<T>({1, 50, 5, 1, 128}, body, halves);
  check<T>({1, 5, 140, 1, 64}, body, cache);  // nobody sees the keys of the last block
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check<T>({1, 1, 70, 1, 16, false}, body, cache);
  check<T>({1, 70, 1, 1, 64, false}, body, halves);
  check<T>({1, 131, 37, 1, 64, false}, body, halves);
  check<T, float>({1, 67, 131, 1, 128}, body, halves);
  check<T>({1, 37, 101, 1, 64, true, 64}, body, cache);
  check<T, float>({1, 65, 100, 1, 80, true, 10}, body, halves);
  check<T>({1, 20, 30, 1, 40, true, 50}, body, cache);
}

// Sizes leave tails in tiles of 64 and 128. Of fp16 only the instructions differ.
TEST_CASE("attention on Hopper" * on_hopper) {
  using T = __nv_bfloat16;
  const Body body = Body::hopper;
  const Layouts cache{alone, spaced, spaced};
  check<T, float>({1, 200, 133, 1, 80, false}, body, cache);  // head size padded to 128; backward, 4 tiles of queries
  check<T>({1, 20, 140, 1, 8, true, 50}, body, cache);        // nobody sees the last tile of keys
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check<T>(square(1, 130, 3, 64), body);                      // two tiles of queries and keys; blocks do one head or two
  check<T>({1, 20, 500, 2, 8, false}, body, cache);           // 8 tiles of keys, each with one tile of queries
  check<__half>(square(1, 9, 2, 8), body);
  check_non_finite<T>(square(1, 9, 2, 8), body, NAN, 1);
  if (!has_tensor_cores) return skip("to play tensor cores takes long");
  for (int head_size : {64, 128}) {
    check<T>(square(2, 300, 3, head_size), body);
    check<__half>(square(1, 700, 2, head_size), body);
    check<T>(square(1, 1, 1, head_size), body);
    check<T, float>({2, 70, 1, 2, head_size, false}, body, cache);
    check<T>({1, 131, 37, 1, head_size, false}, body, {second_half, first_half, alone});
    check<T, float>({1, 65, 400, 1, head_size - 8, true, 10}, body, cache);
  }
}

// They are zeros in the tile, whose score 0 may be far above all others.
TEST_CASE("attention on Hopper: keys past the last count for nothing" * on_hopper) {
  const Sizes s{1, 9, 20, 1, 8, false};
  auto [qkv, dout] = Inputs<__nv_bfloat16>(s);
  for (size_t i = 0; i < qkv.size(); ++i)
    if (i / s.head_size % 3 < 2) qkv[i] = from_float<__nv_bfloat16>(i / s.head_size % 3 == 0 ? 20 : -20);
  for (double gradient : run(s, Body::hopper, qkv, dout).dqkv) CHECK(std::isfinite(gradient));
}

// Scores of `size` and more: all of a row's weight is on its largest, which is farther above the next than products are
// off. (What little is left of P on the way back is finite, and not compared.)
template <class T>
void check_huge_scores(double size, Body body) {
  CAPTURE(size);
  const Sizes s = square(1, 70, 2, 64);
  auto [qkv, dout] = Inputs<T>(s);
  const size_t C = s.channels();
  for (size_t i = 0; i < qkv.size(); ++i)
    if (i / C % 3 < 2) qkv[i] = from_float<T>(float(to_float(qkv[i]) * std::sqrt(size)));
  const Results r = run<T, float>(s, body, qkv, dout);
  double largest = 0, worst = 0, worst_lse = 0;
  const auto raise = [](double& to, double error) { to = error <= to ? to : error; };  // NaN stays
  for (int head = 0; head < s.heads; ++head)
    for (int t = 0; t < s.queries; ++t) {
      const auto at = [&](int row, int part, int d) { return double(to_float(qkv[(row * 3 + part) * C + head * s.head_size + d])); };
      double best = -INFINITY;
      int winner = 0;
      for (int j = 0; j <= t; ++j) {
        double score = 0;
        for (int d = 0; d < s.head_size; ++d) score += at(t, 0, d) * at(j, 1, d) / 8;
        if (score > best) best = score, winner = j;
      }
      largest = std::max(largest, std::abs(best));
      for (int d = 0; d < s.head_size; ++d)
        raise(worst, std::abs(r.out[t * C + head * s.head_size + d] / at(winner, 2, d) - 1));
      raise(worst_lse, std::abs(r.lse[head * s.queries + t] - best) / size);
    }
  CHECK(largest > size);
  CHECK(worst <= 2 * rounding<T>);  // of P and of the output
  CHECK(worst_lse < 1e-5);  // 64 products, each a rounding of numbers up to 10 sizes
  for (double gradient : r.dqkv) CHECK(std::isfinite(gradient));
}
TEST_CASE_TEMPLATE("attention: finite scores give finite outputs and gradients, however large they are", T, float, __nv_bfloat16, __half) {
  for (const double size : {1e7, 1e8, 1e9, 1e15, 1e30}) {
    if (std::is_same_v<T, __half> && size > 1e8) continue;  // of queries and keys of 1e4: half holds no more
    check_huge_scores<T>(size, Body::chosen);
    if (sizeof(T) == 2) check_huge_scores<T>(size, Body::tensor_cores);
  }
}
TEST_CASE("attention on Hopper: finite scores give finite outputs and gradients, however large they are" * on_hopper) {
  for (const double size : {1e8, 1e9, 1e30}) check_huge_scores<__nv_bfloat16>(size, Body::hopper);
}

// Queries past the last are zeros in the tile: their output is a mean of all values, and may be larger than all others. Here
// these see the first key alone, whose value is small.
void check_rows_past_the_last(Body body) {
  const Sizes s = square(1, 70, 1, 64);
  auto [qkv, dout] = Inputs<__nv_bfloat16>(s);
  const size_t row = size_t(3 * s.head_size), of_values = size_t(2 * s.head_size);
  for (size_t i = 0; i < qkv.size(); ++i)
    qkv[i] = from_float<__nv_bfloat16>(i % row < size_t(s.head_size) ? 3 : i % row < of_values ? (i < row ? 3 : -3) : i < row ? 0.01f : 2);
  for (double x : run(s, body, qkv, dout).out) CHECK(x < 0.02);
}
TEST_CASE("attention: rows past the last leave no maximum") {
  for (const Body body : {Body::chosen, Body::tensor_cores}) check_rows_past_the_last(body);
}
TEST_CASE("attention on Hopper: rows past the last leave no maximum" * on_hopper) { check_rows_past_the_last(Body::hopper); }

TEST_CASE("attention on Hopper: the same bits each time" * on_hopper) {
  if (!large_shapes) return skip("this build is too slow for large shapes");
  const Sizes s = has_tensor_cores ? square(16, 1024, 12, 64) : square(1, 130, 1, 8);
  const auto [qkv, dout] = Inputs<__nv_bfloat16>(s);
  const Results first = run(s, Body::hopper, qkv, dout);
  for (int i = 0; i < (has_tensor_cores ? 5 : 1); ++i) {
    const Results again = run(s, Body::hopper, qkv, dout);
    CHECK(same_bits(again.out, first.out));
    CHECK(same_bits(again.dqkv, first.dqkv));
  }
}

// The keys from `first` on.
template <class T>
QkvHeads<T> keys_from(QkvHeads<T> heads, int first) {
  heads.k.data += int64_t(first) * heads.k.strides.row;
  heads.v.data += int64_t(first) * heads.v.strides.row;
  return heads;
}

// Attention over keys [0, cut) and [cut, keys), each computed as if there were no others, merged by their log-sum-exps.
// Backward, with out and lse of all keys, gives each part's share of dQ, and its keys' dK and dV.
template <class T>
void check_parts(const Sizes& s, int cut) {
  CAPTURE(s.causal);
  const Sizes left{s.batch, s.queries, cut, s.heads, s.head_size, s.causal, s.past};
  const Sizes right{s.batch, s.queries, s.keys - cut, s.heads, s.head_size, s.causal, s.past - cut};
  const int C = s.channels(), seq_len = seq_len_of(s);
  const Inputs<T> inputs(s);
  const AttentionReference expected = inputs.reference(s);
  Buffer<T> qkv(inputs.qkv), dout(inputs.dout), out(dout.size());
  Buffer<float> lse(expected.lse.size()), row_dots(lse.size()), dqkv(std::vector<float>(qkv.size()));
  const QkvHeads<const T> x = packed_qkv<const T>(qkv, seq_len, C);
  auto forward = [&](const QkvHeads<const T>& x, const Sizes& sizes) {
    out.poison(), lse.poison();
    attention_forward(packed_heads<T>(out, s.queries, C), lse.data(), x, sizes, test_stream());
    return Results{out.numbers(), lse.numbers(), {}};
  };
  auto backward = [&](const QkvHeads<const T>& x, const QkvHeads<float>& dx, const Sizes& sizes) {
    attention_backward(dx, row_dots.data(), packed_heads<const T>(dout, s.queries, C),
                       packed_heads<const T>(out, s.queries, C), x, lse.data(), sizes, test_stream());
    return dqkv.numbers();
  };
  const Results a = forward(x, left), b = forward(keys_from(x, cut), right);
  Results merged = a;
  for (size_t i = 0; i < a.lse.size(); ++i) {
    merged.lse[i] = std::log(std::exp(a.lse[i]) + std::exp(b.lse[i]));
    const size_t query = i % s.queries, head = i / s.queries % s.heads, sample = i / s.queries / s.heads;
    for (int d = 0; d < s.head_size; ++d) {
      const size_t at = (sample * s.queries + query) * C + head * s.head_size + d;
      merged.out[at] = std::exp(a.lse[i] - merged.lse[i]) * a.out[at] + std::exp(b.lse[i] - merged.lse[i]) * b.out[at];
    }
  }
  forward(x, s);
  const QkvHeads<float> dx = packed_qkv<float>(dqkv, seq_len, C);
  merged.dqkv = backward(x, dx, left);
  const std::vector<double> both = backward(keys_from(x, cut), keys_from(dx, cut), right);
  for (size_t i = 0; i < both.size(); ++i)
    if (const bool of_query = i / C % 3 == 0; of_query) merged.dqkv[i] += both[i];
    else merged.dqkv[i] = both[i];
  const double f = attention_sum_error(s), u = rounding<T>;  // each weight in the merged sum is off by 2f at most
  CHECK_CLOSE(merged.lse, expected.lse, 1.0, f);
  CHECK_WITHIN("out", worst_excess(merged.out, expected.out, expected.out_terms, u + 3 * f, f), 1);
  CHECK_WITHIN("dqkv", worst_excess(merged.dqkv, expected.dqkv, expected.dqkv_terms, u + 4 * f, 4 * f), 1);
}

TEST_CASE_TEMPLATE("attention: parts of the keys, merged by their lse, are attention over all", T, float,
                   __nv_bfloat16, __half) {
  check_parts<T>({1, 33, 66, 2, 40, true, 33}, 33);   // before the diagonal, and on it: what a ring computes
  if (!large_shapes) return skip("this build is too slow for large shapes");
  check_parts<T>({2, 37, 101, 2, 64, false}, 41);
  check_parts<T>({2, 37, 101, 2, 64, true, 64}, 41);  // the second part's diagonal begins inside of it
}

TEST_CASE("attention: which pairs are seen, and how many") {
  for (int queries : {1, 5, 9})
    for (int keys : {1, 5, 9})
      for (int past : {0, 3, 9})
        for (bool causal : {false, true}) {
          const Sizes s{1, queries, keys, 1, 16, causal, past};
          int pairs = 0;
          for (int query = 0; query < queries; ++query)
            for (int key = 0; key < keys; ++key) {
              const bool seen = !causal || key <= past + query;
              CHECK((key <= s.last_key(query)) == seen);
              CHECK((query >= s.first_query(key)) == seen);
              pairs += seen;
            }
          CHECK(std::abs(pairs - s.pairs()) <= queries / 2.0);  // half a pair for each query on the diagonal
        }
  CHECK(square(1, 6, 1, 16).pairs() == 18);
}

TEST_CASE("attention: packs are as large as the places of rows allow") {
  const Buffer<float> memory(1);  // at a multiple of 16 elements at least
  const float* first = memory.data();
  CHECK(common_unit(64, Heads<const float>{first, {64, 640}}) % 16 == 0);
  CHECK(common_unit(24, Heads<const float>{first, {64, 640}}) == 8);
  CHECK(common_unit(64, Heads<const float>{first, {65, 640}}) == 1);
  CHECK(common_unit(64, Heads<const float>{first, {64, 642}}) == 2);
  CHECK(common_unit(64, Heads<const float>{first + 4, {64, 640}}) == 4);
}

TEST_CASE("attention: bytes and FLOPs of rectangles") {
  using T = __nv_bfloat16;
  Profiler::instance().enabled = true;
  auto totals = [](const Sizes& s) {
    const Inputs<T> inputs(s);
    run<T, float>(s, Body::chosen, inputs.qkv, inputs.dout);
    return Profiler::instance().collect();
  };
  auto all = totals({2, 3, 40, 1, 16, false}), few = totals({2, 3, 40, 1, 16});  // few: 3 of 40 keys are seen
  Profiler::instance().enabled = false;
  const double columns = 2 * 16;  // B·C
  CHECK(all["attention_forward"].flops == 4 * columns * 3 * 40);
  CHECK(all["attention_backward"].flops == 14 * columns * 3 * 40);
  CHECK(all["attention_forward"].bytes == columns * 2 * (2 * 3 + 2 * 40));
  CHECK(all["attention_backward"].bytes == columns * (2 * (3 * 3 + 2 * 40) + 4 * (3 + 2 * 40)));
  CHECK(few["attention_forward"].flops == 4 * columns * 4.5);
  CHECK(few["attention_forward"].bytes == columns * 2 * (2 * 3 + 2 * 3));
  CHECK(few["attention_backward"].bytes == columns * (2 * (3 * 3 + 2 * 3) + 4 * (3 + 2 * 40)));
}

TEST_CASE_TEMPLATE("attention of packed tensors equals attention of their rows", T, float, __nv_bfloat16) {
  const Sizes s = square(2, 37, 3, 16);
  const Inputs<T> inputs(s);
  const Results expected = run(s, Body::chosen, inputs.qkv, inputs.dout);
  Buffer<T> qkv(inputs.qkv), dout(inputs.dout), out(dout.size()), dqkv(qkv.size());
  Buffer<float> lse(expected.lse.size()), row_dots(lse.size());
  attention_forward<T>(out, lse, qkv, 2, 37, 3, 16, test_stream());
  attention_backward<T>(dqkv, row_dots, dout, out, qkv, lse, 2, 37, 3, 16, test_stream());
  CHECK(same_bits(out.numbers(), expected.out));
  CHECK(same_bits(lse.numbers(), expected.lse));
  CHECK(same_bits(dqkv.numbers(), expected.dqkv));
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
  if (!large_shapes) return skip("this build is too slow for large shapes");
  for (Body body : {Body::chosen, Body::tensor_cores, Body::hopper})
    for (float value : {float(INFINITY), float(NAN)})
      for (int part : {0, 1, 2, 3})
        if (body != Body::hopper || (has_tensor_cores && has_wgmma())) check_non_finite<T>(square(1, 70, 2, 64), body, value, part);
}

// Is the library there, and does it do this shape? From then on it does, so these tests come last.
template <class T>
bool plan(const Sizes& s, const Layouts& layouts = {}) {
  if (!has_library_attention) return false;
  const PlacedTensor<T> q(s, s.queries, layouts.queries, 0), k(s, s.keys, layouts.keys, 1);
  const PlacedTensor<T> v(s, s.keys, layouts.keys, 2), out(s, s.queries, layouts.out, 0);
  const QkvHeads<T> qkv{q.template heads<T>(), k.template heads<T>(), v.template heads<T>()};
  const std::string problem = plan_attention<T>(s, strides_of(qkv, out.template heads<T>()));
  if (!problem.empty())
    MESSAGE("left out: ", s.queries, " queries, ", s.keys, " keys, head size ", s.head_size, ": ", problem);
  return problem.empty();
}

const char* no_library = "no library here does attention";

TEST_CASE_TEMPLATE("attention by a library", T, __nv_bfloat16, __half) {
  if (!has_library_attention) return skip(no_library);
  for (const Sizes& s : {square(2, 128, 2, 64), square(1, 256, 3, 128), square(2, 200, 3, 64), square(1, 129, 2, 128),
                         square(2, 37, 3, 8), square(1, 70, 2, 40), square(1, 50, 2, 80), square(1, 1, 1, 64)})
    if (plan<T>(s)) check<T>(s, Body::library);
}

TEST_CASE_TEMPLATE("attention of rectangles by a library", T, __nv_bfloat16, __half) {
  if (!has_library_attention) return skip(no_library);
  const Layouts halves{second_half, first_half, alone}, cache{alone, spaced, spaced};
  for (const Layouts& layouts : {halves, cache})
    for (const Sizes& s : {Sizes{2, 64, 128, 2, 64, false}, {2, 128, 64, 2, 64, false}, {1, 37, 101, 2, 128, false},
                           {2, 96, 96, 2, 64}, {1, 101, 37, 2, 64}, {1, 1, 130, 2, 64, false}})
      if (plan<T>(s, layouts)) check<T>(s, Body::library, layouts);
}

TEST_CASE("attention by a library: where there is one, it does gpt2's shape") {
  if (has_library_attention) CHECK(plan<__nv_bfloat16>(square(2, 1024, 12, 64)));
  CHECK_FALSE(plan_attention<float>(square(2, 1024, 12, 64), packed_strides(1024, 12 * 64)).empty());
  CHECK_FALSE(attention_is_planned<float>(square(2, 1024, 12, 64), packed_strides(1024, 12 * 64)));
}

TEST_CASE_TEMPLATE("attention by a library: infinity and NaN come through", T, __nv_bfloat16, __half) {
  const Sizes s = square(1, 72, 2, 64);
  if (!plan<T>(s)) return skip(no_library);
  for (float value : {float(INFINITY), float(NAN)})
    for (int part : {0, 1, 2, 3}) check_non_finite<T>(s, Body::library, value, part);
}

TEST_CASE_TEMPLATE("attention by a library: the same bits each time", T, __nv_bfloat16, __half) {
  const Sizes s = square(4, 512, 4, 64);
  if (!plan<T>(s)) return skip(no_library);
  const auto [qkv, dout] = Inputs<T>(s);
  const Results first = run(s, Body::library, qkv, dout);
  for (int i = 0; i < 5; ++i) {
    const Results again = run(s, Body::library, qkv, dout);
    CHECK(again.out == first.out);
    CHECK(again.lse == first.lse);
    CHECK(again.dqkv == first.dqkv);
  }
}
