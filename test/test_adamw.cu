// AdamW against float64: float weights, bf16 weights with float masters, and bf16 weights alone.
#include "kernels/adamw.cuh"
#include "test/kernel_test.cuh"

#include <bit>

namespace {

constexpr AdamW options = {
    .learning_rate = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f};
constexpr float clip = 0.37f;

struct Reference {
  std::vector<double> w, m, v;

  // torch.optim.AdamW's documentation, line by line.
  void update(const std::vector<double>& gradients, size_t decayed, int step, double weight_decay = options.weight_decay) {
    const double lr = options.learning_rate, beta1 = options.beta1, beta2 = options.beta2;
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = gradients[i] * clip;
      if (i < decayed) w[i] -= lr * weight_decay * w[i];
      m[i] = beta1 * m[i] + (1 - beta1) * g;
      v[i] = beta2 * v[i] + (1 - beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(beta1, step)), v_hat = v[i] / (1 - std::pow(beta2, step));
      w[i] -= lr * m_hat / (std::sqrt(v_hat) + options.epsilon);
    }
  }
};

// Device memory of one stretch of parameters, and the reference that starts from the same values.
struct Parameters {
  explicit Parameters(const std::vector<float>& weights)
      : zeros(weights.size()),
        masters(weights),
        first(zeros),
        second(zeros),
        factor(std::vector<float>{clip}),
        state(std::vector<AdamWState>(1)),
        reference{as_double(weights), as_double(zeros), as_double(zeros)} {}
  std::vector<float> zeros;
  Buffer<float> masters, first, second, factor;
  Buffer<AdamWState> state;
  Reference reference;
};

template <class T>
void check(size_t count, size_t decayed) {
  CAPTURE(count);
  CAPTURE(decayed);
  Parameters p(random_values<float>(count));
  Buffer<T> weights(count);
  T* weights_d = weights;
  if constexpr (std::is_same_v<T, float>) weights_d = p.masters;
  const int steps = 5;
  for (int step = 1; step <= steps; ++step) {
    const auto values = random_values<float>(count, 1, 0, step);
    Buffer<float> gradients(values);
    adamw_count(p.state, p.factor, options, test_stream());
    adamw<T>(weights_d, p.masters, p.first, p.second, gradients, p.factor, p.state, count, decayed, options,
             test_stream());
    p.reference.update(as_double(values), decayed, step);
  }
  // The worst case. Each step rounds a weight once, and what it subtracts, some hundredths of it, a few times. Each
  // step rounds the first moment's terms three times; they may cancel, and are (1 − β1)·clip·4 = 0.15 at most. The
  // second moment's new term is rounded five times, the old one twice.
  CHECK_CLOSE(p.masters.numbers(), p.reference.w, 1.0, steps * rounding<float>);
  CHECK_CLOSE(p.first.numbers(), p.reference.m, 0.15, 3 * steps * rounding<float>);
  CHECK_CLOSE(p.second.numbers(), p.reference.v, 0.0, (5 + 2 * (steps - 1)) * rounding<float>);
  if constexpr (!std::is_same_v<T, float>) {
    std::vector<T> rounded;
    for (float w : p.masters.get()) rounded.push_back(from_float<T>(w));
    CHECK(same_bits(weights.get(), rounded));
  }
}

std::vector<__nv_bfloat16> stochastic_update(const std::vector<__nv_bfloat16>& before,
                                             const std::vector<float>& gradient_values, uint64_t key, size_t begin = 0,
                                             Part part = {}) {
  const size_t count = before.size();
  const std::vector<float> zeros(count);
  Buffer<__nv_bfloat16> weights(before);
  Buffer<float> first(zeros), second(zeros), gradients(gradient_values), factor(std::vector<float>{clip});
  Buffer<AdamWState> state(std::vector<AdamWState>(1));
  adamw_count(state, factor, options, test_stream());
  adamw_stochastic(weights.data(), nullptr, first.data(), second.data(), gradients, factor, state, count, false, options,
                   {key, 0, begin, part}, test_stream());
  return weights.get();
}

// The moments in bf16 after a first update of fp32 weights that are zero: of each element the first and the second.
std::vector<__nv_bfloat16> narrow_moments(const std::vector<float>& gradient_values, uint64_t key, size_t begin = 0, Part part = {}) {
  const size_t count = gradient_values.size();
  const std::vector<__nv_bfloat16> zeros(count, from_float<__nv_bfloat16>(0));
  Buffer<__nv_bfloat16> first(zeros), second(zeros);
  Buffer<float> weights(std::vector<float>(count, 0.0f)), gradients(gradient_values), factor(std::vector<float>{clip});
  Buffer<AdamWState> state(std::vector<AdamWState>(1));
  adamw_count(state, factor, options, test_stream());
  adamw_stochastic(weights.data(), weights.data(), first.data(), second.data(), gradients, factor, state, count, false, options,
                   {0, key, begin, part}, test_stream());
  const auto m = first.get(), v = second.get();
  std::vector<__nv_bfloat16> both;
  for (size_t i = 0; i < count; ++i) both.push_back(m[i]), both.push_back(v[i]);
  return both;
}

__global__ void round_kernel(__nv_bfloat16* out, float x) {
  const uint32_t random16 = blockIdx.x * blockDim.x + threadIdx.x;
  out[random16] = round_stochastically(x, random16);
}

// x rounded with each of the 65,536 possible random numbers.
std::vector<double> all_roundings(float x) {
  Buffer<__nv_bfloat16> out(65536);
  round_kernel<<<256, 256, 0, test_stream()>>>(out.data(), x);
  return out.numbers();
}

}  // namespace

TEST_CASE_TEMPLATE("adamw", T, float, __nv_bfloat16, __half) {
  constexpr size_t pack = pack_width<float>;
  check<T>(pack, pack);
  check<T>(13 * pack, 0);
  check<T>(pack_block * pack, pack_block * pack);  // exactly one block
  check<T>((pack_block + 1) * pack, 6 * pack);
  if (large_shapes) check<T>(4 * pack_block * pack, 99 * pack);
}

TEST_CASE("adamw without masters follows float64 to the next bf16") {
  AdamW strong = options;
  strong.weight_decay = 10;  // a tenth of each weight: far more than a unit in the last place
  for (bool decays : {false, true}) {
    const size_t count = 257 * pack_width<float>;
    const auto before = random_values<__nv_bfloat16>(count);
    std::vector<float> weights_as_float, gradient_values = random_values<float>(count, 1, 0, 2);
    for (__nv_bfloat16 w : before) weights_as_float.push_back(to_float(w));
    Parameters p(weights_as_float);
    Buffer<__nv_bfloat16> weights(before);
    Buffer<float> gradients(gradient_values);
    adamw_count(p.state, p.factor, strong, test_stream());
    adamw_stochastic(weights.data(), nullptr, p.first.data(), p.second.data(), gradients, p.factor, p.state, count, decays,
                     strong, {1, 0, 0, {}}, test_stream());
    p.reference.update(as_double(gradient_values), decays ? count : 0, 1, strong.weight_decay);
    // To a neighbour, up to a whole unit in the last place away, from a float that is off by some units of its own; the
    // moments, new, are rounded as above.
    CHECK_CLOSE(weights.numbers(), p.reference.w, 1e-6, 2 * rounding<__nv_bfloat16> + 1e-5);
    CHECK_CLOSE(p.first.numbers(), p.reference.m, 0.0, 3 * rounding<float>);
    CHECK_CLOSE(p.second.numbers(), p.reference.v, 0.0, 5 * rounding<float>);
  }
}

// The update itself uses the moments before they are rounded, so a first one leaves the weights as with fp32 moments.
TEST_CASE_TEMPLATE("bf16 moments follow float64 to the next bf16", T, float, __nv_bfloat16, __half) {
  const size_t count = 257 * pack_width<float>;
  const auto before = random_values<float>(count), values = random_values<float>(count, 1, 0, 2);
  Parameters p(before), wide(before);
  const std::vector<__nv_bfloat16> zeros(count, from_float<__nv_bfloat16>(0));
  Buffer<__nv_bfloat16> first(zeros), second(zeros);
  Buffer<T> weights(count), wide_weights(count);
  Buffer<float> gradients(values);
  const auto of = [](Parameters& one, Buffer<T>& own) {
    if constexpr (std::is_same_v<T, float>) return one.masters.data();
    else return own.data();
  };
  for (Parameters* one : {&p, &wide}) adamw_count(one->state, one->factor, options, test_stream());
  adamw<T>(of(wide, wide_weights), wide.masters, wide.first, wide.second, gradients, wide.factor, wide.state, count, count,
           options, test_stream());
  adamw_stochastic(of(p, weights), p.masters.data(), first.data(), second.data(), gradients, p.factor, p.state, count, true,
                   options, {0, 1, 0, {}}, test_stream());
  CHECK(same_bits(p.masters.get(), wide.masters.get()));
  if constexpr (!std::is_same_v<T, float>) CHECK(same_bits(weights.get(), wide_weights.get()));
  p.reference.update(as_double(values), count, 1);
  // A unit in the last place, and the roundings of a first step in fp32.
  CHECK_CLOSE(first.numbers(), p.reference.m, 0.0, 2 * rounding<__nv_bfloat16> + 3 * rounding<float>);
  CHECK_CLOSE(second.numbers(), p.reference.v, 0.0, 2 * rounding<__nv_bfloat16> + 5 * rounding<float>);
}

TEST_CASE("bf16 moments are kept on average" * doctest::skip(!large_shapes)) {
  const size_t count = 400000;
  const float gradient = 1.001f;  // both moments lie between two bf16
  const auto moments = narrow_moments(std::vector<float>(count, gradient), 7);
  const double g = double(gradient) * clip, wanted[] = {(1 - double(options.beta1)) * g, (1 - double(options.beta2)) * g * g};
  for (size_t which : {0, 1}) {
    double sum = 0;
    for (size_t i = which; i < moments.size(); i += 2) sum += to_float(moments[i]);
    const double unit = std::exp2(std::floor(std::log2(wanted[which])) - 7);  // deviation: half of it at most
    CHECK_WITHIN("mean", sum / count - wanted[which], 4 * unit / 2 / std::sqrt(double(count)) + 5 * rounding<float> * wanted[which]);
  }
  CHECK_FALSE(same_bits(narrow_moments(std::vector<float>(count, gradient), 8), moments));
}

TEST_CASE("stochastic rounding is unbiased" * doctest::skip(!large_shapes)) {
  // With all random numbers the mean of the two neighbours is x itself, exactly.
  for (float x : {1.0f, 1.001f, -1.2345f, 3.14159e-5f, -2.7e20f, 1e-40f, 0.0f}) {
    CAPTURE(x);
    const std::vector<double> rounded = all_roundings(x);
    double sum = 0;
    for (double y : rounded) sum += y;
    CHECK(sum / double(rounded.size()) == double(x));
    const auto [low, high] = std::minmax_element(rounded.begin(), rounded.end());
    CHECK(*high - *low <= std::max(std::abs(x) * 0x1p-7, 0x1p-133));  // a unit in the last place
  }
}

TEST_CASE("stochastic rounding keeps what is not finite" * doctest::skip(!large_shapes)) {
  const auto always = [](float x, auto holds) {
    const std::vector<double> rounded = all_roundings(x);
    return std::all_of(rounded.begin(), rounded.end(), holds);
  };
  CHECK(always(-INFINITY, [](double y) { return y == -INFINITY; }));
  CHECK(always(NAN, [](double y) { return std::isnan(y); }));
  const float last_bit_set = std::bit_cast<float>(0xff800001);  // a NaN; cut to bf16 it would be an infinity
  CHECK(always(last_bit_set, [](double y) { return std::isnan(y); }));
}

TEST_CASE("updates far below a unit in the last place are kept on average" * doctest::skip(!large_shapes)) {
  // The first update is of size lr whatever the gradient: 1 becomes 1 − 0.01 = 253.44/256, in steps of 1/256.
  const size_t count = 400000;
  const std::vector<__nv_bfloat16> ones(count, from_float<__nv_bfloat16>(1));
  const std::vector<float> gradients(count, 1.0f);
  const auto after = stochastic_update(ones, gradients, 7);
  double sum = 0;
  size_t neighbours = 0;
  for (__nv_bfloat16 w : after) {
    sum += to_float(w);
    neighbours += to_float(w) == 253.0f / 256 || to_float(w) == 254.0f / 256;
  }
  CHECK(neighbours == count);
  const double deviation = std::sqrt(0.44 * 0.56 / count) / 256;  // of the mean
  CHECK_WITHIN("mean", sum / count - 0.99, 4 * deviation);
  CHECK(same_bits(stochastic_update(ones, gradients, 7), after));
  CHECK_FALSE(same_bits(stochastic_update(ones, gradients, 8), after));
}

TEST_CASE("parts of a tensor are rounded as the whole is" * doctest::skip(!large_shapes)) {
  const size_t rows = 16, columns = 51, count = rows * 3 * columns;
  const auto before = random_values<__nv_bfloat16>(count);
  const auto gradients = random_values<float>(count);
  const auto after = stochastic_update(before, gradients, 7);
  const auto all_moments = narrow_moments(gradients, 7);
  const size_t third = columns / 3;
  std::vector<size_t> held(count);
  for (size_t rank = 0; rank < 3; ++rank)
    for (const Part& part : {Part{count / 3, count / 3, rank * (count / 3)},      // rows
                             Part{columns, 3 * columns, rank * columns},          // columns
                             Part{third, columns, rank * third}})                 // columns in three blocks
      // Pieces of ZeRO begin at any multiple of a pack. What fills up the last pack does not matter.
      for (size_t begin : {size_t(0), 3 * size_t(pack_width<float>)}) {
        CAPTURE(part.width);
        CAPTURE(begin);
        std::vector<__nv_bfloat16> own, expected;
        std::vector<float> own_gradients;
        for (size_t i = begin; i < count / 3; ++i) {
          own.push_back(before[part.in_whole(i)]);
          own_gradients.push_back(gradients[part.in_whole(i)]);
          expected.push_back(after[part.in_whole(i)]);
          held[part.in_whole(i)] += begin == 0;
        }
        own.resize(round_up(own.size(), size_t(pack_width<float>)));
        own_gradients.resize(own.size());
        const auto moments = narrow_moments(own_gradients, 7, begin, part);
        for (size_t i = 0; i < expected.size(); ++i) {
          const size_t whole = part.in_whole(begin + i);
          CHECK(same_bits(std::vector{moments[2 * i], moments[2 * i + 1]}, std::vector{all_moments[2 * whole], all_moments[2 * whole + 1]}));
        }
        auto actual = stochastic_update(own, own_gradients, 7, begin, part);
        actual.resize(expected.size());
        CHECK(same_bits(actual, expected));
      }
  CHECK(held == std::vector<size_t>(count, 3));
}

TEST_CASE("a weight whose update is zero stays") {
  const auto before = random_values<__nv_bfloat16>(4096);
  CHECK(same_bits(stochastic_update(before, std::vector<float>(before.size()), 3), before));
}

TEST_CASE("an update that is left out is not counted") {
  Buffer<AdamWState> state(std::vector<AdamWState>{{.updates = 4}});
  Buffer<float> good(std::vector<float>{0.5f}), bad(std::vector<float>{-1.0f});
  adamw_count(state, bad, options, test_stream());
  CHECK(state.get()[0].updates == 4);
  adamw_count(state, good, options, test_stream());
  CHECK(state.get()[0].updates == 5);
  CHECK(state.get()[0].correction1 == float(1 / (1 - std::pow(double(options.beta1), 5))));
  CHECK(state.get()[0].correction2 == float(1 / (1 - std::pow(double(options.beta2), 5))));
}
