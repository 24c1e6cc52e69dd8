// Cross-entropy and its gradient over the padded vocabulary against float64.
#include "kernels/cross_entropy.cuh"
#include "test/cross_entropy_reference.h"
#include "test/kernel_test.cuh"

namespace {

// The padding NaN: it may not leak into anything.
template <class T>
std::vector<T> random_logits(const LogitRows& s, double mean, double size = 3) {
  auto logits = random_values<T>(size_t(s.rows) * s.padded, size, mean);
  for (size_t i = 0; i < logits.size(); ++i)
    if (int(i % s.padded) >= s.vocabulary) logits[i] = from_float<T>(NAN);
  return logits;
}

template <class T>
void check(const LogitRows& s, double mean = 0) {
  CAPTURE(s.rows);
  CAPTURE(s.vocabulary);
  const float weight = 1.0f / (3 * s.rows), scale = 128;  // of three micro-batches
  const auto targets = random_targets(s);
  const auto logits = random_logits<T>(s, mean);
  CrossEntropyReference expected = cross_entropy_reference(as_double(logits), targets, s, double(weight) * scale);

  Buffer<T> evaluated(logits), differentiated(logits);
  Buffer<int> targets_d(targets);
  Buffer<float> losses(s.rows), losses_again(s.rows), total(std::vector<float>{0.5f}),
      loss_scale(std::vector<float>{scale});
  cross_entropy<T>(evaluated, losses, total, targets_d, s.rows, s.vocabulary, s.padded, weight, loss_scale, false,
                   test_stream());
  cross_entropy<T>(differentiated, losses_again, total, targets_d, s.rows, s.vocabulary, s.padded, weight, loss_scale,
                   true, test_stream());

  // log Σ exp is rounded, and so is maximum − target, of at most twice the largest logit: three roundings in all.
  const double largest = std::abs(mean) + 15;
  CHECK(same_bits(evaluated.get(), logits));
  CHECK_CLOSE(losses.numbers(), expected.losses, largest, 2e-7);
  CHECK_CLOSE(losses_again.numbers(), expected.losses, largest, 2e-7);
  double expected_total = 0.5;
  for (double loss : expected.losses) expected_total += 2 * loss * weight;
  CHECK_CLOSE(total.numbers(), std::vector<double>{expected_total}, largest, 2e-7);

  // A probability is right relative to itself, however small: exp is off by a few units in the last place,
  // its argument, down to −30, by one rounding (2e-6). At the target, where 1 is subtracted, relative to 1; there large
  // probabilities count, whose arguments are small: 8 roundings of exp, sum, quotient and difference.
  std::vector<double> gradients = differentiated.numbers();
  const auto at_targets = take_targets(gradients, targets, s.padded);
  const auto expected_at_targets = take_targets(expected.gradients, targets, s.padded);
  CHECK_CLOSE(at_targets, expected_at_targets, weight * scale, 5e-7 + rounding<T>);
  // (A half below 2^-14 has a fixed place for its last bit.) 0 in the padding.
  const double least = std::is_same_v<T, __half> ? 0x1p-14 : 1e-30;
  CHECK_CLOSE(gradients, expected.gradients, least, 4e-6 + rounding<T>);
}

// Logits of up to about `size`, all below or above 0 if `sign` is not 0. At 2^30 a unit in the last place is 64, so rows
// have one winner or several that are equal, and probabilities are right to 2^-64 of 1.
template <class T>
void check_huge(double size, int sign) {
  CAPTURE(size);
  CAPTURE(sign);
  const LogitRows s = {16, 211, 256};
  const float weight = 0.25;
  auto logits = random_logits<T>(s, 0, size / 4);
  for (T& z : logits) z = from_float<T>(sign == 0 ? to_float(z) : std::copysign(to_float(z), float(sign)));
  for (int row = 0; row < s.rows; row += 2) logits[size_t(row) * s.padded + 7] = logits[size_t(row) * s.padded + 206];
  const auto targets = random_targets(s);
  const CrossEntropyReference expected = cross_entropy_reference(as_double(logits), targets, s, weight);
  Buffer<T> gradients(logits);
  Buffer<int> targets_d(targets);
  Buffer<float> losses(s.rows), total(std::vector<float>{0}), loss_scale(std::vector<float>{1});
  cross_entropy<T>(gradients, losses, total, targets_d, s.rows, s.vocabulary, s.padded, weight, loss_scale, true, test_stream());
  CHECK_CLOSE(losses.numbers(), expected.losses, size, 2e-7);
  CHECK_CLOSE(gradients.numbers(), expected.gradients, weight, 5e-7 + rounding<T>);
}

}  // namespace

TEST_CASE_TEMPLATE("cross-entropy of finite logits is finite, however large they are", T, float, __nv_bfloat16) {
  for (const double size : {3e8, 1.3e9, 3e9, 3e10, 1e15, 1e30, 1.6e38})
    for (const int sign : {-1, 0, 1}) check_huge<T>(size, sign);
  // In the last power of 2 it may be NaN, but not −infinity, which would be the best of all.
  for (const float value : {3e38f, -3e38f}) {
    Buffer<T> logits(std::vector<T>(128, from_float<T>(value)));
    Buffer<int> target(std::vector<int>{5});
    Buffer<float> loss(1), total(std::vector<float>{0}), loss_scale(std::vector<float>{1});
    cross_entropy<T>(logits, loss, total, target, 1, 100, 128, 1.0f, loss_scale, false, test_stream());
    CHECK(!(loss.get()[0] < 0));
  }
}

TEST_CASE_TEMPLATE("cross-entropy and its gradient", T, float, __nv_bfloat16, __half) {
  check<T>({3, 51, 128});
  check<T>({5, 211, 256});
  check<T>({1, 256, 256});      // one row, no padding
  check<T>({2, 1, 128});        // a single token: loss 0
  check<T>({3, 2000, 2048});    // on the CPU device the longest row of one thread
  check<T>({2, 10007, 10112});  // several packs a thread
  if (large_shapes) check<T>({300, 30, 128});  // more losses than a block of sum_kernel has threads
  if (large_shapes) check<T>({2, 50257, 50304});  // a row of 16-bit logits is kept in shared memory
  if (large_shapes) check<T>({2, 60001, 60032});  // none is
  check<T>({3, 211, 256}, 1000);  // exp would overflow
  check<T>({3, 211, 256}, -1000);  // and here underflow
}
