// The global gradient norm and the clip factor.
#include "kernels/norm.cuh"
#include "test/kernel_test.cuh"

namespace {

GradientSummary norm_of(const std::vector<float>& gradients, float clip, float loss = 1, const StepLimits& limits = {},
                        const LossScale& scale = {}) {
  const size_t count = gradients.size();
  // The gradients are summed in two parts, as a model's units are.
  const size_t parts[] = {count / 2 / pack_width<float> * pack_width<float>, count};
  Buffer<float> values(gradients), partials(2 * partial_sums<float>(count)), losses(std::vector<float>{loss});
  Buffer<double> total(1);
  Buffer<GradientSummary> summary(std::vector<GradientSummary>{{.scale = scale}});
  size_t sums = 0;
  for (size_t part = 0, first = 0; part < 2; first = parts[part++]) {
    if (parts[part] == first) continue;
    square_sums(partials + sums, values + first, parts[part] - first, test_stream());
    sums += partial_sums<float>(parts[part] - first);
  }
  add_up(total, partials, sums, test_stream());
  clip_factor(summary, total, losses, clip, limits, test_stream());
  return summary.get()[0];
}

}  // namespace

TEST_CASE("every element counts once") {
  // Sums of ones are exact, so one element too many or too few shows: at edges of packs and blocks, and where the blocks
  // begin a second round.
  const size_t pack = pack_width<float>, block = sum_block * sum_packs * pack;
  const size_t round = 2 * most_sum_blocks * block;  // of both parts
  for (size_t count : {size_t(1), size_t(51), pack - 1, pack, pack + 1, block - 1, block, block + 1,
                       3 * block + 7, round, round + 1, 2 * round + 51}) {
    if (count > 3 * block + 7 && !large_shapes) continue;  // 134 million, where a pack is as on a GPU
    CAPTURE(count);
    CHECK(norm_of(std::vector<float>(count, 1.0f), 0).norm == float(std::sqrt(double(count))));
  }
}

TEST_CASE("norm of random gradients against float64") {
  for (size_t count : {1000, 77777, 1234567}) {
    CAPTURE(count);
    const auto gradients = random_values<float>(count, 1e-3);
    double sum = 0;
    for (double x : gradients) sum += x * x;
    // Each thread's sum of some dozens of squares is off by about 3 roundings, up or down. Over eight threads or more
    // these cancel to one rounding, and the root halves it. The norm itself is rounded once. The bound is twice that.
    CHECK_CLOSE({norm_of(gradients, 0).norm}, {std::sqrt(sum)}, 0.0, 3 * rounding<float>);
  }
}

TEST_CASE("clip factor is min(1, clip / (norm + 1e-6))") {
  const std::vector<float> gradients = {3, -4};  // norm 5
  CHECK(norm_of(gradients, 0).factor == 1);      // 0: no clipping
  CHECK(norm_of(gradients, 6).factor == 1);
  CHECK(norm_of(gradients, 5).factor == 5.0f / (5.0f + 1e-6f));
  CHECK(norm_of(gradients, 1).factor == 1.0f / (5.0f + 1e-6f));
  CHECK(norm_of({1e-4f}, 1e-5f).factor == 1e-5f / (1e-4f + 1e-6f));
  CHECK(norm_of({0}, 1).norm == 0);
  CHECK(norm_of({0}, 1).factor == 1);
}

TEST_CASE("a gradient that is not finite shows in the norm") {
  std::vector<float> gradients(sum_block * sum_packs * pack_width<float> + 1, 1.0f);
  gradients.back() = NAN;
  CHECK(std::isnan(norm_of(gradients, 1).norm));
  gradients.back() = -INFINITY;
  CHECK(norm_of(gradients, 1).norm == INFINITY);
}

TEST_CASE("a step that is not finite, or beyond its limits, is left out") {
  const std::vector<float> gradients(1000, 0.1f);  // norm 3.16
  const float nan = NAN, infinity = INFINITY;
  CHECK(norm_of(gradients, 0, 2, {3, 4}).factor == 1);
  CHECK(norm_of(gradients, 1, 3, {3, 4}).factor == about(1 / std::sqrt(10.0)));
  for (float loss : {nan, infinity, -infinity, 3.5f}) CHECK(norm_of(gradients, 1, loss, {3, 4}).factor == GradientSummary::left_out);
  CHECK(norm_of(gradients, 1, 2, {3, 3}).factor == GradientSummary::left_out);
  for (float bad : {nan, infinity, -infinity}) {
    std::vector<float> with_one = gradients;
    with_one[700] = bad;
    for (float clip : {0.0f, 1.0f}) CHECK(norm_of(with_one, clip).factor == GradientSummary::left_out);
  }
}

TEST_CASE("the loss scale is taken out of norm and factor") {
  const std::vector<float> gradients = {3 * 1024, -4 * 1024};  // norm 5
  const LossScale scale = {.value = 1024, .window = 3, .good_steps = 1};
  CHECK(norm_of(gradients, 0, 1, {}, scale).norm == 5);
  CHECK(norm_of(gradients, 0, 1, {}, scale).factor == 1.0f / 1024);
  CHECK(norm_of(gradients, 1, 1, {}, scale).factor == 1.0f / (5.0f + 1e-6f) / 1024);
  CHECK(norm_of(gradients, 1, 1, {9, 6}, scale).factor > 0);  // limits are for the norm without the scale
  CHECK(norm_of(gradients, 1, 1, {9, 4}, scale).factor == GradientSummary::left_out);
}

TEST_CASE("the loss scale is halved on overflow and doubled after a window of good steps") {
  const std::vector<float> good = {3, -4}, bad = {3, INFINITY};
  LossScale scale = {.value = 1024, .window = 3};
  const auto after = [&](const std::vector<float>& gradients, float loss = 1, const StepLimits& limits = {}) {
    scale = norm_of(gradients, 1, loss, limits, scale).scale;
    return std::pair(scale.value, scale.good_steps);
  };
  CHECK(after(good) == std::pair(1024.0f, 1));
  CHECK(after(good) == std::pair(1024.0f, 2));
  CHECK(after(good) == std::pair(2048.0f, 0));
  CHECK(after(good, 5, {4, 4}) == std::pair(2048.0f, 1));  // left out as a spike: that is no overflow
  CHECK(after(bad) == std::pair(1024.0f, 0));
  CHECK(after(bad) == std::pair(512.0f, 0));
  CHECK(after(good, NAN) == std::pair(256.0f, 0));
  CHECK(scale.window == 3);
  scale.value = LossScale::least;
  CHECK(after(bad).first == LossScale::least);
  scale = {.value = LossScale::most, .window = 1};
  CHECK(after(good).first == LossScale::most);
  scale = {.value = 1024, .window = 0};  // it stays
  CHECK(after(good) == std::pair(1024.0f, 0));
  CHECK(after(bad) == std::pair(1024.0f, 0));
}
