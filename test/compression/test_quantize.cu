// Codes of 8 and 4 bits against float64 on the host: all codes, ties, zeros, what is not finite, and exact sums.
#include "extensions/compression/kernels/quantize.cuh"
#include "test/kernel_test.cuh"

#include <bit>

namespace {

struct Message {
  std::vector<int> codes;
  std::vector<float> scales;  // of runs
};

// Reads a message byte by byte, as its format says.
Message read(const uint8_t* bytes, size_t count, int bits) {
  Message message;
  for (size_t i = 0; i < count; ++i) {
    const int code = bits == 8 ? bytes[i] : bytes[i / 2] >> (i % 2 * 4) & 15, sign = 1 << (bits - 1);
    message.codes.push_back((code ^ sign) - sign);
  }
  for (size_t run = 0; run < (count + 255) / 256; ++run) {
    const uint8_t* scale = bytes + count * size_t(bits) / 8 + 2 * run;
    message.scales.push_back(std::bit_cast<float>((scale[0] | uint32_t(scale[1]) << 8) << 16));
  }
  return message;
}

struct Result {
  std::vector<Message> messages;
  std::vector<float> errors;
  std::vector<double> received;  // code · scale
};

Result quantized(const std::vector<float>& values, const std::vector<float>& errors, int number, int bits,
                 Feedback feedback = Feedback::add, float unit = 1) {
  const size_t count = values.size() / size_t(number), bytes = message_bytes(count, bits);
  Buffer<uint8_t> messages(size_t(number) * bytes);
  Buffer<float> in(values), left(errors), scale(std::vector<float>{unit});
  quantize(messages, in, errors.empty() ? nullptr : left.data(), {number, count}, bits, scale, feedback, test_stream());
  Result result;
  const std::vector<uint8_t> all = messages.get();
  for (int i = 0; i < number; ++i) {
    const Message& message = result.messages.emplace_back(read(&all[size_t(i) * bytes], count, bits));
    for (size_t k = 0; k < count; ++k) result.received.push_back(double(message.codes[k]) * message.scales[k / 256]);
  }
  if (!errors.empty()) result.errors = left.get();
  return result;
}

std::vector<float> mixed_values(size_t count, unsigned seed = 1) {
  std::vector<float> values = random_values<float>(count, 1, 0, seed);
  for (size_t i = 0; i < count; ++i) values[i] *= std::ldexp(1.0f, int(i / 256 % 40) - 20);  // runs of other sizes
  return values;
}

// The number of bits behind which a positive float has only zeros.
bool is_bf16(float x) { return (std::bit_cast<uint32_t>(x) & 0xffff) == 0; }

}  // namespace

// The scale is the smallest bf16 that is not below max/largest, by a rounding of the quotient; a code is off by half a
// unit and a rounding of the quotient, so x by (1/2 + 2^-17)·scale, as codes are below 2^7. With no error before, what is
// left out is exact: x = code · scale + error in float64.
TEST_CASE("a code is the nearest one, its scale that of its run, and the error is exact") {
  for (int bits : {8, 4})
    for (size_t count : {64, 192, 256, 320, 4096})
      for (int number : {1, 3}) {
        CAPTURE(bits);
        CAPTURE(count);
        const int largest = (1 << (bits - 1)) - 1;
        const std::vector<float> x = mixed_values(count * size_t(number)), zeros(x.size());
        const Result result = quantized(x, zeros, number, bits);
        double worst = 0;
        for (size_t i = 0; i < x.size(); ++i) {
          const size_t message = i / count, in_message = i % count, begin = in_message / 256 * 256;
          const float scale = result.messages[message].scales[in_message / 256];
          double maximum = 0;
          for (size_t k = begin; k < std::min(begin + 256, count); ++k) maximum = std::max(maximum, std::abs(double(x[message * count + k])));
          REQUIRE(scale >= maximum / largest * (1 - 0x1p-24));
          REQUIRE(scale <= maximum / largest * (1 + 0x1p-7));
          REQUIRE(is_bf16(scale));
          REQUIRE(std::abs(result.messages[message].codes[in_message]) <= largest);
          worst = std::max(worst, std::abs(x[i] - result.received[i]) / scale);
          REQUIRE(double(result.errors[i]) == x[i] - result.received[i]);
        }
        CHECK_WITHIN("codes", worst, 0.5 + 0x1p-17);
        CHECK(worst > 0.4);
      }
}

TEST_CASE("all codes, ties to even, zeros, and numbers that are too small") {
  for (int bits : {8, 4}) {
    CAPTURE(bits);
    const int largest = (1 << (bits - 1)) - 1;
    std::vector<float> x(512);  // from −largest to largest in steps of half a scale, which is 2^-3; both runs have an end
    for (int i = 0; i < 512; ++i) x[size_t(i)] = float(i % (4 * largest + 1) - 2 * largest) / 16;
    const Message message = quantized(x, {}, 1, bits).messages[0];
    CHECK(message.scales == std::vector<float>(2, 0.125f));
    for (size_t i = 0; i < x.size(); ++i) CHECK(message.codes[i] == int(std::nearbyint(double(x[i]) * 8)));  // ties to even
    for (int code = -largest; code <= largest; ++code) CHECK(std::ranges::count(message.codes, code) > 0);
    for (float small : {0.0f, 1e-45f, 1e-40f}) {
      CAPTURE(small);
      const std::vector<float> tiny(256, small);
      const Result of_tiny = quantized(tiny, std::vector<float>(256), 1, bits);
      for (size_t i = 0; i < tiny.size(); ++i) CHECK(double(of_tiny.errors[i]) == small - of_tiny.received[i]);
    }
  }
}

TEST_CASE("what is not finite is received as NaN, and harms neither its run nor its error") {
  for (int bits : {8, 4})
    for (float bad : {NAN, INFINITY, -INFINITY}) {
      CAPTURE(bits);
      std::vector<float> x = random_values<float>(512);
      const Result good = quantized(x, std::vector<float>(512), 1, bits);
      x[77] = bad;
      const Result result = quantized(x, std::vector<float>(512, 0.0f), 1, bits);
      CHECK(result.messages[0].codes[77] == -(1 << (bits - 1)));
      CHECK(result.errors[77] == 0);
      for (size_t i = 256; i < 512; ++i) CHECK(result.errors[i] == good.errors[i]);
      for (size_t i = 0; i < 256; ++i)
        if (i != 77) CHECK(double(result.errors[i]) == x[i] - result.received[i]);
      Buffer<float> in(x), out(512), unit(std::vector<float>{1});
      Buffer<uint8_t> message(message_bytes(512, bits));
      quantize(message, in, nullptr, {1, 512}, bits, unit, Feedback::add, test_stream());
      dequantize(out.data(), message, {1, 512}, 1, bits, false, test_stream());
      const std::vector<float> values = out.get();
      for (size_t i = 0; i < 512; ++i) CHECK(std::isnan(values[i]) == (i == 77));
    }
}

// x = value + error · unit is rounded once, and its difference from what is received is rounded once more if the compiler
// adds in another order: 2^-23 of the largest.
TEST_CASE("errors are added, or kept, in units of the loss scale") {
  for (int bits : {8, 4})
    for (float unit : {1.0f, 1024.0f}) {
      CAPTURE(bits);
      const std::vector<float> x = random_values<float>(640, unit), before = random_values<float>(640, 0.01, 0, 2);
      const Result added = quantized(x, before, 2, bits, Feedback::add, unit), kept = quantized(x, before, 2, bits, Feedback::keep, unit);
      const Result alone = quantized(x, {}, 2, bits, Feedback::add, unit);
      CHECK(kept.received == alone.received);
      CHECK(added.received != alone.received);
      for (size_t i = 0; i < x.size(); ++i) {
        const double sent = x[i] + double(before[i]) * unit;
        CHECK(std::abs(added.received[i] + double(added.errors[i]) * unit - sent) <= 0x1p-23 * 5 * unit);
        CHECK(std::abs(kept.received[i] + (double(kept.errors[i]) - before[i]) * unit - x[i]) <= 0x1p-23 * 5 * unit);
      }
    }
}

TEST_CASE("a sum of messages is the sum of what they say in fp32, in their order, bit for bit") {
  for (int bits : {8, 4})
    for (int terms : {1, 2, 5})
      for (bool add : {false, true}) {
        CAPTURE(bits);
        CAPTURE(terms);
        constexpr size_t count = 448;
        constexpr int number = 3;
        const std::vector<float> x = mixed_values(count * size_t(number * terms), 3), before = random_values<float>(count * number);
        const size_t bytes = message_bytes(count, bits);
        Buffer<uint8_t> messages(size_t(number * terms) * bytes);
        Buffer<float> in(x), out(before), unit(std::vector<float>{1});
        quantize(messages, in, nullptr, {number * terms, count}, bits, unit, Feedback::add, test_stream());
        dequantize(out.data(), messages, {number, count}, terms, bits, add, test_stream());
        const std::vector<double> received = quantized(x, {}, number * terms, bits).received;
        std::vector<float> wanted(before.size());
        for (size_t i = 0; i < wanted.size(); ++i) {
          float sum = 0;
          for (size_t term = 0; term < size_t(terms); ++term)
            sum += float(received[(i / count * size_t(terms) + term) * count + i % count]);  // exact: 15 bits
          wanted[i] = add ? before[i] + sum : sum;
        }
        CHECK(same_bits(out.get(), wanted));
      }
}

// Of N messages of x the sum of what is received is N·x less the last error: their mean converges as 1/N. Without
// feedback each message makes the same error.
TEST_CASE("with error feedback the mean of many messages is what was to be sent; without it never") {
  constexpr int messages = 200;
  for (int bits : {8, 4}) {
    CAPTURE(bits);
    const std::vector<float> x = random_values<float>(256);
    const double scale = quantized(x, {}, 1, bits).messages[0].scales[0];
    for (bool feeds_back : {true, false}) {
      std::vector<double> sums(x.size());
      std::vector<float> errors(x.size());
      for (int i = 0; i < messages; ++i) {
        const Result result = quantized(x, feeds_back ? errors : std::vector<float>(), 1, bits);
        if (feeds_back) errors = result.errors;
        for (size_t k = 0; k < x.size(); ++k) sums[k] += result.received[k];
      }
      double worst = 0;
      for (size_t k = 0; k < x.size(); ++k) worst = std::max(worst, std::abs(sums[k] / messages - x[k]));
      // A scale with feedback is larger by half a scale / largest at most, an error half of that; and roundings.
      if (feeds_back) CHECK_WITHIN("mean", worst, 0.6 * scale / messages + 0x1p-22);
      else CHECK(worst > 0.4 * scale);
    }
  }
}

TEST_CASE("errors of an update that is left out are cleared, others stay") {
  for (float factor : {-1.0f, 0.0f, 0.5f}) {
    Buffer<float> errors(std::vector<float>(3000, 2.5f)), device_factor(std::vector<float>{factor});
    clear_if_left_out(errors, 3000, device_factor, test_stream());
    CHECK(errors.get() == std::vector<float>(3000, factor < 0 ? 0.0f : 2.5f));
  }
}
