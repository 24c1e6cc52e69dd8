// cpu/cuda_bf16.h and cpu/cuda_fp16.h against the definition of their formats, computed in double.
//
// A format has p mantissa bits (the leading one counted) and a smallest normal exponent. A number of exponent
// e is a multiple of 2^(e - p + 1), where e is at least that smallest exponent; beyond the largest, infinity.
// Every one of the 65,536 bit patterns is decoded, and floats on and beside every rounding boundary (each
// value and each midpoint of two neighbours) are encoded: as an array, for which g++ makes vector code, and
// one by one.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "cpu/cuda_bf16.h"
#include "cpu/cuda_fp16.h"

struct BrainFloat {
  using Type = __nv_bfloat16;
  static constexpr int mantissa_bits = 8, exponent_bits = 8;
  static Type nearest(float value) { return __float2bfloat16_rn(value); }
  static Type toward_zero(float value) { return __float2bfloat16_rz(value); }
  static float to_float(Type value) { return __bfloat162float(value); }
  static Type from_bits(std::uint16_t bits) { return __ushort_as_bfloat16(bits); }
  static std::uint16_t to_bits(Type value) { return __bfloat16_as_ushort(value); }
};

struct Half {
  using Type = __half;
  static constexpr int mantissa_bits = 11, exponent_bits = 5;
  static Type nearest(float value) { return __float2half_rn(value); }
  static Type toward_zero(float value) { return __float2half_rz(value); }
  static float to_float(Type value) { return __half2float(value); }
  static Type from_bits(std::uint16_t bits) { return __ushort_as_half(bits); }
  static std::uint16_t to_bits(Type value) { return __half_as_ushort(value); }
};

enum class Rounding { nearest, toward_zero };

template <class Format>
struct Reference {
  static constexpr int fraction_bits = Format::mantissa_bits - 1;
  static constexpr int bias = (1 << (Format::exponent_bits - 1)) - 1;
  static constexpr int infinity_bits = ((1 << Format::exponent_bits) - 1) << fraction_bits;

  static bool is_nan(std::uint16_t bits) { return (bits & 0x7fff) > infinity_bits; }

  static double decode(std::uint16_t bits) {
    const int exponent = (bits & 0x7fff) >> fraction_bits;
    const double fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = bits & 0x8000 ? -1 : 1;
    if ((bits & 0x7fff) == infinity_bits) return sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
    return sign * std::ldexp(std::ldexp(1.0, fraction_bits) + fraction, exponent - bias - fraction_bits);
  }

  static std::uint16_t encode(double value, Rounding rounding) {
    const std::uint64_t value_bits = std::bit_cast<std::uint64_t>(value);  // signbit() is lost to the flags
    const int sign = value_bits >> 63 ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (magnitude > std::numeric_limits<float>::max()) return sign | infinity_bits;
    const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), 1 - bias) : 1 - bias;
    const double exact = std::ldexp(magnitude, fraction_bits - exponent);
    const double units = rounding == Rounding::nearest ? std::nearbyint(exact) : std::trunc(exact);
    // Units above 2^fraction_bits carry into the exponent: bit patterns count on across powers of two.
    const double bits = units + std::ldexp(exponent - (1 - bias), fraction_bits);
    const int overflow = rounding == Rounding::nearest ? infinity_bits : infinity_bits - 1;
    return sign | static_cast<int>(std::min<double>(bits, overflow));
  }

  static std::uint16_t encode(float value, Rounding rounding) {
    const bool is_nan = (std::bit_cast<std::uint32_t>(value) & 0x7fffffff) > 0x7f800000;
    return is_nan ? 0x7fff : encode(static_cast<double>(value), rounding);
  }
};

// Both signs of: every finite value, every midpoint of neighbours, and the floats beside them.
template <class Format>
std::vector<float> rounding_boundaries() {
  std::vector<float> floats;
  const float infinity = std::numeric_limits<float>::infinity();
  for (int bits = 0; bits < Reference<Format>::infinity_bits; ++bits) {
    const double value = Reference<Format>::decode(bits);
    const double above = bits + 1 < Reference<Format>::infinity_bits
                             ? Reference<Format>::decode(bits + 1)
                             : 2 * value - Reference<Format>::decode(bits - 1);
    for (const double boundary : {value, (value + above) / 2}) {
      const float middle = static_cast<float>(boundary);
      for (const float x : {std::nextafter(middle, -infinity), middle, std::nextafter(middle, infinity)}) {
        floats.push_back(x);
        floats.push_back(-x);
      }
    }
  }
  return floats;
}

// A sweep over all floats (a prime step, so that all low bits occur), NaNs with any payload among them.
std::vector<float> sweep() {
  std::vector<float> floats;
  for (std::uint64_t bits = 0; bits < 1ull << 32; bits += 4099) {
    floats.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  for (const std::uint32_t bits : {0x7f800000u, 0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7f7fffffu, 0u, 1u}) {
    floats.push_back(std::bit_cast<float>(bits));
    floats.push_back(std::bit_cast<float>(bits | 0x80000000));
  }
  return floats;
}

template <class Format>
void check_encoding(const std::vector<float>& floats) {
  using Type = typename Format::Type;
  std::vector<Type> nearest(floats.size()), toward_zero(floats.size());
  for (size_t k = 0; k < floats.size(); ++k) nearest[k] = Format::nearest(floats[k]);
  for (size_t k = 0; k < floats.size(); ++k) toward_zero[k] = Format::toward_zero(floats[k]);
  size_t wrong = 0;
  for (size_t k = 0; k < floats.size() && wrong < 10; ++k) {
    const volatile float one = floats[k];
    const int expected = Reference<Format>::encode(floats[k], Rounding::nearest);
    const int expected_toward_zero = Reference<Format>::encode(floats[k], Rounding::toward_zero);
    const int got = Format::to_bits(nearest[k]), got_toward_zero = Format::to_bits(toward_zero[k]);
    const int got_one = Format::to_bits(Type(one));
    if (got == expected && got_toward_zero == expected_toward_zero && got_one == expected) continue;
    ++wrong;
    INFO("float bits ", std::bit_cast<std::uint32_t>(floats[k]), " value ", floats[k]);
    CHECK(got == expected);
    CHECK(got_one == expected);
    CHECK(got_toward_zero == expected_toward_zero);
  }
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("every bit pattern decodes to its value and encodes back", Format, BrainFloat, Half) {
  std::vector<typename Format::Type> patterns(65536);
  for (size_t bits = 0; bits < 65536; ++bits) patterns[bits] = Format::from_bits(bits);
  std::vector<float> floats(65536);
  for (size_t bits = 0; bits < 65536; ++bits) floats[bits] = Format::to_float(patterns[bits]);
  size_t wrong = 0;
  for (size_t bits = 0; bits < 65536; ++bits) {
    const std::uint32_t got = std::bit_cast<std::uint32_t>(floats[bits]);
    if (Reference<Format>::is_nan(bits)) {
      wrong += (got & 0x7fffffff) <= 0x7f800000 || Format::to_bits(Format::nearest(floats[bits])) != 0x7fff;
      continue;
    }
    const float expected = static_cast<float>(Reference<Format>::decode(bits));
    const bool same = got == std::bit_cast<std::uint32_t>(expected) &&
                      got == std::bit_cast<std::uint32_t>(float(patterns[bits])) &&
                      Format::to_bits(Format::nearest(floats[bits])) == bits &&
                      Format::to_bits(Format::toward_zero(floats[bits])) == bits;
    wrong += !same;
  }
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("floats round as the format defines", Format, BrainFloat, Half) {
  SUBCASE("on and beside every boundary") { check_encoding<Format>(rounding_boundaries<Format>()); }
  SUBCASE("across all floats") { check_encoding<Format>(sweep()); }
}

TEST_CASE("values known from the standards") {
  CHECK(__half_as_ushort(65504.0f) == 0x7bff);
  CHECK(__half_as_ushort(65519.996f) == 0x7bff);
  CHECK(__half_as_ushort(65520.0f) == 0x7c00);
  CHECK(__half_as_ushort(-65520.0f) == 0xfc00);
  CHECK(__half_as_ushort(__float2half_rz(1e30f)) == 0x7bff);
  CHECK(__half_as_ushort(0x1p-24f) == 1);
  CHECK(__half_as_ushort(0x1p-25f) == 0);
  CHECK(__half_as_ushort(std::nextafter(0x1p-25f, 1.0f)) == 1);
  CHECK(__half_as_ushort(1.0f) == 0x3c00);
  CHECK(__bfloat16_as_ushort(1.0f) == 0x3f80);
  CHECK(__bfloat16_as_ushort(0x1.01p0f) == 0x3f80);  // a tie, to even
  CHECK(__bfloat16_as_ushort(0x1.03p0f) == 0x3f82);
  CHECK(__bfloat16_as_ushort(std::numeric_limits<float>::max()) == 0x7f80);
  CHECK(__bfloat16_as_ushort(__float2bfloat16_rz(std::numeric_limits<float>::max())) == 0x7f7f);
}

TEST_CASE_TEMPLATE("an operation rounds its exact result once", Format, BrainFloat, Half) {
  using Type = typename Format::Type;
  std::mt19937 random(1);
  size_t wrong = 0;
  // Values of moderate exponents: sum and product are exact in double, and the quotient is never near a tie.
  const auto draw = [&] {
    const float mantissa = random() % 2048 - 1023.5f;
    return Type(std::ldexp(mantissa, static_cast<int>(random() % 8) - 10));
  };
  for (int k = 0; k < 1000000; ++k) {
    const Type a = draw(), b = draw();
    const double x = float(a), y = float(b);
    const auto is_rounded = [](Type result, double exact) {
      return exact == 0 || Format::to_bits(result) == Reference<Format>::encode(exact, Rounding::nearest);
    };
    Type sum = a, product = a;
    wrong += !is_rounded(a + b, x + y) || !is_rounded(sum += b, x + y) || !is_rounded(a - b, x - y);
    wrong += !is_rounded(a * b, x * y) || !is_rounded(product *= b, x * y) || !is_rounded(a / b, x / y);
    wrong += (a < b) != (x < y) || (a == b) != (x == y) || float(-a) != -x;
  }
  CHECK(wrong == 0);
}

TEST_CASE("pairs keep x low and y high") {
  const __nv_bfloat162 b = __floats2bfloat162_rn(1.0f, -2.0f);
  CHECK(__low2float(b) == 1.0f);
  CHECK(__high2float(b) == -2.0f);
  CHECK(__bfloat1622float2(__floats2bfloat162_rn(3.0f, 4.0f)).y == 4.0f);
  CHECK(float(__high2bfloat16(__halves2bfloat162(5.0f, 6.0f))) == 6.0f);
  CHECK(__bfloat16_as_ushort(__low2bfloat16(__halves2bfloat162(1.0f, 0.0f))) == 0x3f80);
  const __half2 h = __floats2half2_rn(1.0f, -2.0f);
  CHECK(__low2float(h) == 1.0f);
  CHECK(__high2float(h) == -2.0f);
  CHECK(__half22float2(__floats2half2_rn(3.0f, 4.0f)).y == 4.0f);
  CHECK(float(__high2half(__halves2half2(5.0f, 6.0f))) == 6.0f);
  CHECK(sizeof(b) == 4);
  CHECK(alignof(__half2) == 4);
  CHECK(alignof(__nv_bfloat16) == 2);
}

TEST_CASE("vector types have CUDA's sizes and alignments") {
  CHECK((sizeof(int3) == 12 && alignof(int3) == 4));
  CHECK((sizeof(float2) == 8 && alignof(float2) == 8));
  CHECK((sizeof(int4) == 16 && alignof(int4) == 16));
  CHECK((sizeof(uint4) == 16 && alignof(uint4) == 16));
  const dim3 extent = 7;
  CHECK((extent.x == 7 && extent.y == 1 && extent.z == 1));
}

TEST_CASE("an int4 may alias an array of bfloat16") {
  alignas(16) __nv_bfloat16 from[8], to[8];
  for (int k = 0; k < 8; ++k) from[k] = float(k);
  *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(from);
  for (int k = 0; k < 8; ++k) CHECK(float(to[k]) == float(k));
}
