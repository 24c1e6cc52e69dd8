// cpu/cuda_fp8.h against the definition of its formats, computed in double. (test_fp8 has them against PyTorch's.)
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "cpu/cuda_fp8.h"

namespace {

struct E4M3 {
  using Type = __nv_fp8_e4m3;
  static constexpr __nv_fp8_interpretation_t format = __NV_E4M3;
  static constexpr int mantissa_bits = 3, bias = 7, last = 0x7e;
};
struct E5M2 {
  using Type = __nv_fp8_e5m2;
  static constexpr __nv_fp8_interpretation_t format = __NV_E5M2;
  static constexpr int mantissa_bits = 2, bias = 15, last = 0x7b;
};

// Of a code from 0 to `last`, which are the numbers in their order.
template <class Format>
double value_of(int code) {
  const int exponent = code >> Format::mantissa_bits, fraction = code & ((1 << Format::mantissa_bits) - 1);
  const int unit = 1 - Format::bias - Format::mantissa_bits;  // of subnormal numbers, as a power of two
  return exponent == 0 ? std::ldexp(fraction, unit) : std::ldexp((1 << Format::mantissa_bits) + fraction, unit + exponent - 1);
}

// The nearest code of a magnitude: of two that are as near the even one, and the last one for all beyond it.
template <class Format>
int nearest(double magnitude) {
  magnitude = std::min(magnitude, value_of<Format>(Format::last));
  int best = 0;
  for (int code = 1; code <= Format::last; ++code) {
    const double further = std::abs(value_of<Format>(code) - magnitude), before = std::abs(value_of<Format>(best) - magnitude);
    if (further < before || (further == before && code % 2 == 0)) best = code;
  }
  return best;
}

template <class Format>
int code_of(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, Format::format);
}

float decoded(uint8_t code, E4M3) { return std::bit_cast<__nv_fp8_e4m3>(code).operator float(); }
float decoded(uint8_t code, E5M2) { return std::bit_cast<__nv_fp8_e5m2>(code).operator float(); }

bool is_nan(float x) { return (std::bit_cast<uint32_t>(x) & 0x7fffffff) > 0x7f800000; }

}  // namespace

TEST_CASE_TEMPLATE("every code has its value, and its value that code", Format, E4M3, E5M2) {
  for (int code = 0; code < 256; ++code) {
    CAPTURE(code);
    const int magnitude = code & 0x7f;
    const float got = decoded(uint8_t(code), Format{});
    const bool is_infinite = Format::mantissa_bits == 2 && magnitude == 0x7c;
    if (magnitude > Format::last && !is_infinite) {
      CHECK(is_nan(got));
      CHECK(code_of<Format>(got) == 0x7f);
      continue;
    }
    const double value = is_infinite ? double(std::numeric_limits<float>::infinity()) : value_of<Format>(magnitude);
    CHECK(std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(float(code & 0x80 ? -value : value)));
    CHECK(code_of<Format>(got) == (is_infinite ? (code & 0x80) + Format::last : code));
  }
}

TEST_CASE_TEMPLATE("floats round to the nearest code, ties to even, and saturate", Format, E4M3, E5M2) {
  std::set<float> floats;
  const auto add = [&](double middle) {
    for (const float x : {std::nextafter(float(middle), 0.0f), float(middle), std::nextafter(float(middle), INFINITY)}) floats.insert(x);
  };
  for (int code = 0; code <= Format::last; ++code) {
    add(value_of<Format>(code));
    add((value_of<Format>(code) + value_of<Format>(code + 1)) / 2);  // beyond the last one it saturates
  }
  for (const double huge : {500.0, 1e4, 6e4, 1e6, 3e38}) add(huge);
  for (const double tiny : {1e-45, 1e-40, 1e-38, 1e-10}) add(tiny);
  for (uint64_t bits = 0; bits < 0x7f800000; bits += 1'000'003) floats.insert(std::bit_cast<float>(uint32_t(bits)));
  const std::vector<float> all(floats.begin(), floats.end());
  std::vector<uint8_t> codes(all.size());  // as an array, for which g++ makes vector code
  for (size_t i = 0; i < all.size(); ++i) codes[i] = __nv_cvt_float_to_fp8(-all[i], __NV_SATFINITE, Format::format);
  for (size_t i = 0; i < all.size(); ++i) {
    CAPTURE(all[i]);
    const int wanted = nearest<Format>(all[i]);
    REQUIRE(code_of<Format>(all[i]) == wanted);
    REQUIRE(codes[i] == wanted + 0x80);
  }
  for (const float x : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max()}) {
    CHECK(code_of<Format>(x) == Format::last);
    CHECK(code_of<Format>(-x) == Format::last + 0x80);
  }
  for (const uint32_t nan : {0x7f800001u, 0x7fc00000u, 0xffc12345u, 0x7fffffffu}) CHECK(code_of<Format>(std::bit_cast<float>(nan)) == 0x7f);
}

TEST_CASE("values known from the formats' tables (arXiv:2209.05433)") {
  CHECK(code_of<E4M3>(448) == 0x7e);
  CHECK(code_of<E4M3>(0x1p-9f) == 1);
  CHECK(code_of<E4M3>(0x1p-10f) == 0);  // a tie, to even
  CHECK(code_of<E4M3>(1) == 0x38);
  CHECK(code_of<E5M2>(57344) == 0x7b);
  CHECK(code_of<E5M2>(0x1p-16f) == 1);
  CHECK(code_of<E5M2>(1) == 0x3c);
  CHECK(__nv_cvt_float2_to_fp8x2({1, -1}, __NV_SATFINITE, __NV_E4M3) == 0xb838);
}
