// Cross-entropy whose vocabulary several ranks share, played by one process: against float64, and against the kernel of
// one rank.
#include "extensions/tensor_parallel/kernels/vocabulary_cross_entropy.cuh"
#include "test/cross_entropy_reference.h"
#include "test/kernel_test.cuh"

namespace {

constexpr float scale = 128;  // of the loss

// Whole logits (rows, V), and how the ranks share them: each has `padded` columns, of which at most `tokens` are tokens.
struct Shape {
  int rows, vocabulary, ranks, padded, tokens = padded;
};

VocabularyShard shard_of(const Shape& s, int rank) {
  const int first = std::min(rank * s.tokens, s.vocabulary);
  return {first, std::min(s.tokens, s.vocabulary - first)};
}

// The columns of one rank, the padding NaN: it may not leak into anything.
template <class T>
std::vector<T> columns_of(const std::vector<T>& logits, const Shape& s, int rank) {
  const VocabularyShard shard = shard_of(s, rank);
  std::vector<T> own(size_t(s.rows) * s.padded, from_float<T>(NAN));
  for (int row = 0; row < s.rows; ++row)
    std::copy_n(logits.begin() + size_t(row) * s.vocabulary + shard.first, shard.rows, own.begin() + size_t(row) * s.padded);
  return own;
}

template <class T>
struct Results {
  std::vector<float> losses, total;
  std::vector<T> gradients;  // (rows, V): the columns of all ranks
};

// Computes what the ranks compute together. Rank 0 adds to the total, as one of them has to.
template <class T>
Results<T> run(const std::vector<T>& logits, const std::vector<int>& targets, const Shape& s, float weight,
               bool write_gradient) {
  Buffer<int> targets_d(targets);
  Buffer<float> total(std::vector<float>{0.5f}), loss_scale(std::vector<float>{scale});
  Buffer<RowStatistics> gathered(size_t(s.ranks) * s.rows);
  for (int rank = 0; rank < s.ranks; ++rank) {
    const std::vector<T> before = columns_of(logits, s, rank);
    Buffer<T> own(before);
    vocabulary_statistics<T>(gathered + size_t(rank) * s.rows, own, targets_d, s.rows, shard_of(s, rank), s.padded,
                             test_stream());
    CHECK(same_bits(own.get(), before));
  }
  Results<T> results{{}, {}, logits};
  for (int rank = 0; rank < s.ranks; ++rank) {
    const VocabularyShard shard = shard_of(s, rank);
    const std::vector<T> before = columns_of(logits, s, rank);
    Buffer<T> own(before);
    Buffer<RowStatistics> all(gathered.get());
    Buffer<float> losses(s.rows);
    vocabulary_cross_entropy<T>(own, losses, rank == 0 ? total.data() : nullptr, all, s.ranks, targets_d, s.rows, shard,
                                s.padded, weight, loss_scale, write_gradient, test_stream());
    if (rank == 0) results.losses = losses.get();
    CHECK(same_bits(losses.get(), results.losses));  // on all ranks
    const std::vector<T> after = own.get();
    if (!write_gradient) CHECK(same_bits(after, before));
    bool padding_is_zero = true;
    for (int row = 0; row < s.rows; ++row) {
      const auto begin = after.begin() + size_t(row) * s.padded;
      std::copy_n(begin, shard.rows, results.gradients.begin() + size_t(row) * s.vocabulary + shard.first);
      for (int c = shard.rows; c < s.padded; ++c) padding_is_zero = padding_is_zero && to_float(begin[c]) == 0;
    }
    if (write_gradient) CHECK(padding_is_zero);
  }
  results.total = total.get();
  return results;
}

// One rank's kernel for the whole vocabulary.
template <class T>
Results<T> run_whole(const std::vector<T>& logits, const std::vector<int>& targets, int vocabulary, float weight) {
  const int rows = int(targets.size());
  const Shape s = {rows, vocabulary, 1, round_up(vocabulary, 128)};
  Buffer<T> padded(columns_of(logits, s, 0));
  Buffer<int> targets_d(targets);
  Buffer<float> losses(rows), total(std::vector<float>{0.5f}), loss_scale(std::vector<float>{scale});
  cross_entropy<T>(padded, losses, total, targets_d, rows, vocabulary, s.padded, weight, loss_scale, true, test_stream());
  std::vector<T> gradients;
  const std::vector<T> all = padded.get();
  for (int row = 0; row < rows; ++row) {
    const auto begin = all.begin() + size_t(row) * s.padded;
    gradients.insert(gradients.end(), begin, begin + vocabulary);
  }
  return {losses.get(), total.get(), gradients};
}

template <class T>
void check(const Shape& s, double mean = 0) {
  CAPTURE(s.vocabulary);
  CAPTURE(s.ranks);
  const float weight = 1.0f / (3 * s.rows);  // of three micro-batches
  const LogitRows whole = {s.rows, s.vocabulary, s.vocabulary};
  const auto targets = random_targets(whole);
  const auto logits = random_values<T>(size_t(s.rows) * s.vocabulary, 3, mean);
  CrossEntropyReference expected = cross_entropy_reference(as_double(logits), targets, whole, double(weight) * scale);
  const Results<T> evaluated = run(logits, targets, s, weight, false), actual = run(logits, targets, s, weight, true);
  CHECK(same_bits(evaluated.losses, actual.losses));
  CHECK(same_bits(evaluated.total, actual.total));

  // The bounds of one rank's kernel (test_cross_entropy.cu), and what comes with several: the sum is rounded by each rank's
  // exp, product and addition, of which the exp's argument adds half a rounding (d·exp(−d) < 0.4): 2 roundings and one an
  // addition, for 8 ranks 6e-7 of the sum, and of the logarithm 6e-7, a 25th of the largest logit.
  const double largest = std::abs(mean) + 15;
  CHECK_CLOSE(as_double(actual.losses), expected.losses, largest, 2.5e-7);
  double expected_total = 0.5;
  for (double loss : expected.losses) expected_total += loss * weight;
  CHECK_CLOSE(as_double(actual.total), std::vector<double>{expected_total}, largest, 2.5e-7);
  std::vector<double> gradients = as_double(actual.gradients);
  const auto at_targets = take_targets(gradients, targets, s.vocabulary);
  const auto expected_at_targets = take_targets(expected.gradients, targets, s.vocabulary);
  CHECK_CLOSE(at_targets, expected_at_targets, weight * scale, 1.1e-6 + rounding<T>);
  const double least = std::is_same_v<T, __half> ? 0x1p-14 : 1e-30;
  CHECK_CLOSE(gradients, expected.gradients, least, 4.6e-6 + rounding<T>);
  if (s.ranks > 1) return;

  // The same exps as one rank's kernel, perhaps added in another order: the sum is off by some roundings at most.
  const Results<T> one = run_whole(logits, targets, s.vocabulary, weight);
  CHECK_CLOSE(as_double(actual.losses), as_double(one.losses), largest, 2e-7);
  CHECK_CLOSE(as_double(actual.total), as_double(one.total), largest, 2e-7);
  std::vector<double> of_one = as_double(one.gradients);
  const auto of_one_at_targets = take_targets(of_one, targets, s.vocabulary);
  CHECK_CLOSE(at_targets, of_one_at_targets, weight * scale, 4e-7 + 2 * rounding<T>);
  CHECK_CLOSE(gradients, of_one, least, 4e-7 + 2 * rounding<T>);
}

// In float all that is finite agrees within the bounds above, and what is not finite is the same.
bool agree(const std::vector<float>& a, const std::vector<float>& b) {
  bool right = a.size() == b.size();
  for (size_t i = 0; right && i < a.size(); ++i)
    right = (std::isnan(a[i]) && std::isnan(b[i])) || a[i] == b[i] || std::abs(a[i] - b[i]) <= 5e-6f * std::abs(b[i]);
  return right;
}

}  // namespace

TEST_CASE_TEMPLATE("cross-entropy of a shared vocabulary", T, float, __nv_bfloat16, __half) {
  check<T>({1, 211, 2, 128});
  check<T>({1, 10007, 4, 2528});  // several packs a thread
  if (!large_shapes) return skip("this build is too slow for large shapes");
  for (int ranks : {1, 2, 3, 4, 8}) check<T>({5, 211, ranks, round_up(ceil_div(211, ranks), 32)});  // 8: the last has none
  check<T>({5, 211, 3, 128});      // as the model cuts it
  check<T>({16, 211, 3, 96, 71});  // padding on every rank
  check<T>({3, 129, 8, 128});      // six of eight have none
  check<T>({2, 1, 2, 128});        // a single token: loss 0
  check<T>({300, 30, 2, 32});      // more rows than a block of combine_statistics_kernel has
  check<T>({2, 50257, 2, 25216});
  check<T>({2, 60001, 1, 60032});    // no row is kept in shared memory
  check<T>({3, 211, 3, 96}, 1000);   // exp would overflow
  check<T>({3, 211, 3, 96}, -1000);  // and here underflow
}

TEST_CASE_TEMPLATE("a loss of finite logits is finite, however large they are", T, float, __nv_bfloat16) {
  const LogitRows s = {16, 211, 211};
  const auto targets = random_targets(s);
  for (const double size : {3e8, 1.3e9, 3e9, 1e30, 1.6e38}) {
    CAPTURE(size);
    const auto logits = random_values<T>(size_t(s.rows) * s.vocabulary, size / 4);
    const CrossEntropyReference expected = cross_entropy_reference(as_double(logits), targets, s, double(scale) / s.rows);
    const Results<T> actual = run(logits, targets, {s.rows, s.vocabulary, 3, 96}, 1.0f / s.rows, true);
    CHECK_CLOSE(as_double(actual.losses), expected.losses, size, 2.5e-7);
    CHECK_CLOSE(as_double(actual.gradients), expected.gradients, double(scale) / s.rows, 1.1e-6 + rounding<T>);
  }
}

TEST_CASE("logits that are not finite: as one rank has it" * doctest::skip(!large_shapes)) {
  constexpr int V = 40, rows = 10, width = 32;  // of two shards of 32 and 8 columns, and one of none
  constexpr float nan = NAN, infinity = INFINITY;
  std::vector<float> logits = random_values<float>(rows * V, 3);
  std::vector<int> targets(rows, 3);
  const auto fill = [&](int row, int begin, int end, float x) {
    std::fill(logits.begin() + row * V + begin, logits.begin() + row * V + end, x);
  };
  targets[1] = V - 1;
  fill(2, 5, 6, nan);
  fill(3, width + 1, width + 2, infinity);
  fill(4, width, V, -infinity);        // the second rank has nothing that counts
  fill(5, 0, width, -infinity);        // the first has nothing, and the target
  fill(6, 0, V, -infinity);
  fill(7, 0, V, nan);
  fill(8, 0, width, -infinity);
  fill(8, 7, 8, nan);                  // the first has nothing but a NaN
  fill(9, 0, V, -infinity);
  fill(9, 3, 4, 2.0f);                 // nothing but the target
  const Results<float> one = run_whole(logits, targets, V, 0.25f);
  for (int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    const auto actual = run<float>(logits, targets, {rows, V, ranks, ranks == 1 ? 64 : width}, 0.25f, true);
    CHECK(agree(actual.losses, one.losses));
    CHECK(agree(actual.gradients, one.gradients));
    CHECK(std::isnan(actual.total[0]));
    for (int row : {0, 1, 4}) CHECK(std::isfinite(actual.losses[row]));
    for (int row : {2, 3, 6, 7, 8}) CHECK(std::isnan(actual.losses[row]));
    CHECK(actual.losses[5] == infinity);
    CHECK(actual.losses[9] == 0);
  }
}
