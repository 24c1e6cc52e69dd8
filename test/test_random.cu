// Philox against the known answers of its authors, the normal quantile against an inversion of erfc, initial weights
// against both, and the weights of a tensor's parts against the whole tensor's.
#include "kernels/random.cuh"
#include "test/kernel_test.cuh"

#include <array>

namespace {

using Words = std::array<uint32_t, 4>;

__global__ void philox_kernel(uint4* out, const uint64_t* keys, const uint64_t* counters, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = philox(keys[i], counters[i]);
}

__global__ void quantile_kernel(float* out, const uint32_t* bits, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = normal_from_bits(bits[i]);
}

// Philox4x32-10 with its whole counter of 128 bits, of which the kernels use 64.
Words philox_reference(Words counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(0xD2511F53) * counter[0], product1 = uint64_t(0xCD9E8D57) * counter[2];
    counter = {uint32_t(product1 >> 32) ^ counter[1] ^ key[0], uint32_t(product1),
               uint32_t(product0 >> 32) ^ counter[3] ^ key[1], uint32_t(product0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

Words philox_reference(uint64_t key, uint64_t counter) {
  return philox_reference({uint32_t(counter), uint32_t(counter >> 32), 0, 0},
                          {uint32_t(key), uint32_t(key >> 32)});
}

// z with Φ(z) = (bits + 0.5)/2^32, by Newton's method from 0: below the median Φ is convex, so no step is too
// long. By erf near the median and erfc in the tail, so that nothing cancels.
double quantile_reference(uint32_t bits) {
  const double p = (std::min(bits, ~bits) + 0.5) / 4294967296.0;
  double z = 0;
  for (int step = 0; step < 60; ++step) {
    const double excess = p > 0.1 ? std::erf(z / M_SQRT2) / 2 - (p - 0.5) : std::erfc(-z / M_SQRT2) / 2 - p;
    z -= excess * std::sqrt(2 * M_PI) * std::exp(z * z / 2);
  }
  return bits >> 31 ? -z : z;
}

// The relative error of the approximation itself: "about 1 part in 10^7" (AS 241). It is computed in float64, so no
// machine's rounding shows; results come as close to it as they can.
constexpr double quantile_error = 1.2e-7;

std::vector<float> normals(size_t count, uint64_t key, float standard_deviation) {
  Buffer<float> out(count);
  fill_random(out, 0, count, key, standard_deviation, test_stream());
  return out.get();
}

struct NamedPart {
  const char* name;
  size_t count;
  Part part;
};

// The parts that each of three ranks may hold of a tensor (rows, 3·columns), and a part without rows.
std::vector<NamedPart> parts_of_three(size_t rows, size_t columns) {
  std::vector<NamedPart> parts = {{"no rows", 0, {1, 1, rows * 3 * columns}}};
  for (size_t rank = 0; rank < 3; ++rank) {
    const size_t width = columns / 3, row = 3 * columns;
    const size_t begin = rank * rows / 3, count = ((rank + 1) * rows / 3 - begin) * row;
    parts.push_back({"rows", count, {count, count, begin * row}});
    parts.push_back({"columns", rows * columns, {columns, row, rank * columns}});
    parts.push_back({"columns in three blocks", rows * columns, {width, columns, rank * width}});
  }
  return parts;
}

// Mean of x[i]^power · x[i + lag].
double moment(const std::vector<float>& x, int power, int lag = -1) {
  double sum = 0;
  for (size_t i = 0; i + std::max(lag, 0) < x.size(); ++i)
    sum += std::pow(x[i], power) * (lag < 0 ? 1 : x[i + lag]);
  return sum / x.size();
}

}  // namespace

TEST_CASE("Philox4x32-10") {
  // Random123, tests/kat_vectors: counter and key all zeros, all ones, digits of π.
  CHECK(philox_reference({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox_reference({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) ==
        Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox_reference({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});

  std::mt19937_64 generator(5);
  std::vector<uint64_t> keys = {0, ~0ull, 0, ~0ull, 1}, counters = {0, 0, ~0ull, ~0ull, 1ull << 32};
  for (int i = 0; i < 100; ++i) keys.push_back(generator()), counters.push_back(generator());
  const int count = int(keys.size());
  Buffer<uint64_t> keys_d(keys), counters_d(counters);
  Buffer<uint4> out(count);
  philox_kernel<<<ceil_div(count, 32), 32, 0, test_stream()>>>(out.data(), keys_d.data(), counters_d.data(),
                                                                     count);
  const std::vector<uint4> actual = out.get();
  for (int i = 0; i < count; ++i) {
    const auto [x, y, z, w] = actual[i];
    CHECK(Words{x, y, z, w} == philox_reference(keys[i], counters[i]));
  }
}

TEST_CASE("normal quantile" * doctest::skip(!large_shapes)) {
  std::vector<uint32_t> bits = {0, 1, 2, 3, ~0u, ~1u, 0x7fffffff, 0x80000000, 0x7fffff00, 0x80000100};
  const uint32_t central = uint32_t(0.075 * 4294967296.0);  // where the approximation changes
  for (uint32_t edge : {central, ~central})
    for (uint32_t i = 0; i < 5; ++i) bits.push_back(edge - 2 + i);
  for (uint64_t i = 12345; i < 1ull << 32; i += 200003) bits.push_back(uint32_t(i));
  const int count = int(bits.size());
  Buffer<uint32_t> bits_d(bits);
  Buffer<float> out(count);
  quantile_kernel<<<ceil_div(count, 256), 256, 0, test_stream()>>>(out.data(), bits_d.data(), count);
  std::vector<double> expected;
  for (uint32_t b : bits) expected.push_back(quantile_reference(b));
  CHECK_CLOSE(out.numbers(), expected, 0.0, quantile_error + rounding<float>);
}

TEST_CASE("element i of a tensor depends on (key, i) alone") {
  const uint64_t key = random_key(1337, "transformer.wte.weight");
  const std::vector<float> whole = normals(5001, key, 0.02f);
  std::vector<double> expected;
  for (size_t i = 0; i < whole.size(); ++i)
    expected.push_back(double(0.02f) * quantile_reference(philox_reference(key, i / 4)[i % 4]));
  CHECK_CLOSE(as_double(whole), expected, 0.0, quantile_error + 2 * rounding<float>);
  for (size_t count : {1, 2, 3, 5, 1023, 1024, 1025})
    CHECK(same_bits(normals(count, key, 0.02f), std::vector<float>(whole.begin(), whole.begin() + count)));
}

TEST_CASE("a part of a tensor has the numbers of its elements" * doctest::skip(!large_shapes)) {
  CHECK(Part().in_whole(12345) == 12345);
  CHECK(Part{4, 12, 8}.in_whole(0) == 8);
  CHECK(Part{4, 12, 8}.in_whole(3) == 11);
  CHECK(Part{4, 12, 8}.in_whole(4) == 20);  // the next run

  const uint64_t key = random_key(1337, "h.0.attn.c_attn.weight");
  for (size_t columns : {3, 12, 51, 96}) {  // runs of 1, 4, 17 and 32: one to five calls of Philox
    const size_t rows = 7;
    const std::vector<float> whole = normals(rows * 3 * columns, key, 0.02f);
    std::vector<int> held(whole.size());
    for (const auto& [name, count, part] : parts_of_three(rows, columns)) {
      CAPTURE(name);
      CAPTURE(columns);
      std::vector<float> expected;
      for (size_t i = 0; i < count; ++i) {
        expected.push_back(whole[part.in_whole(i)]);
        ++held[part.in_whole(i)];
      }
      // ZeRO cuts a part anywhere, so it is made in two ranges, too.
      for (size_t first : {size_t(0), count / 2}) {
        Buffer<float> out(count - first);
        fill_random(out, first, count - first, key, 0.02f, test_stream(), part);
        CHECK(same_bits(out.get(), std::vector<float>(expected.begin() + first, expected.end())));
      }
    }
    CHECK(held == std::vector<int>(whole.size(), 3));  // three ways to share a tensor out, each complete
  }
}

TEST_CASE("moments of the initial weights" * doctest::skip(!large_shapes)) {
  const size_t count = 1 << 20;
  const std::vector<float> x = normals(count, random_key(42, "h.0.attn.c_attn.weight"), 1);
  // Four standard deviations of each estimate from `count` independent normal numbers.
  const double unit = 4 / std::sqrt(double(count));
  CHECK_WITHIN("first moment", moment(x, 1), unit);
  CHECK_WITHIN("second moment", moment(x, 2) - 1, unit * std::sqrt(2.0));
  CHECK_WITHIN("third moment", moment(x, 3), unit * std::sqrt(15.0));
  CHECK_WITHIN("fourth moment", moment(x, 4) - 3, unit * std::sqrt(96.0));
  for (int lag : {1, 2, 3, 4, 1024}) CHECK_WITHIN("correlation", moment(x, 1, lag), unit);
}

TEST_CASE("every tensor and seed has its own key") {
  // FNV-1a's published test vectors (64 bits); seed 0 leaves them as they are.
  CHECK(random_key(0, "") == 0xcbf29ce484222325u);
  CHECK(random_key(0, "a") == 0xaf63dc4c8601ec8cu);
  CHECK(random_key(0, "foobar") == 0x85944171f73967e8u);
  CHECK(random_key(1, "foobar") != random_key(2, "foobar"));
}
