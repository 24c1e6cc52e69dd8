// Code that the two 16-bit floats of the CPU device share. Their formats are in cuda_bf16.h and cuda_fp16.h.
//
// Names and results are the CUDA Math API's: rounding is to nearest even unless a name ends in _rz (toward zero); any
// NaN becomes 0x7fff; a number that is too large becomes infinity. An operation is done in float and its result is
// rounded. For normal numbers this is the correctly rounded result, as on the GPU, because a float has at
// least two bits more than twice the mantissa (24 >= 2*11 + 2: Figueroa, "When is double rounding innocuous?", 1995).
// One difference: a double is rounded to float first, while CUDA rounds it once.
//
// Conversions have no branches, so that g++ vectorises loops over arrays.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/vector_types.h"

namespace cpu {

// A Format has nearest(float) and toward_zero(float), which give its bits, and to_float(bits).
template <class Format>
struct Float16 {
  Float16() = default;
  Float16(const Float16&) = default;
  Float16(float value) : bits(Format::nearest(value)) {}
  operator float() const { return Format::to_float(bits); }

  static Float16 from_bits(std::uint16_t bits) {
    Float16 result;
    result.bits = bits;
    return result;
  }

#if defined(CPU_LIKE_A_GPU)
  Float16& operator=(const Float16&) = default;  // so that a pack is stored in one access
#else
  // The same as the default. But for g++ 12 the default is a struct copy, and it does not vectorise loops with these.
  Float16& operator=(const Float16& other) {
    bits = other.bits;
    return *this;
  }
#endif

  friend Float16 operator-(Float16 a) { return from_bits(a.bits ^ 0x8000); }
  friend Float16 operator+(Float16 a, Float16 b) { return float(a) + float(b); }
  friend Float16 operator-(Float16 a, Float16 b) { return float(a) - float(b); }
  friend Float16 operator*(Float16 a, Float16 b) { return float(a) * float(b); }
  friend Float16 operator/(Float16 a, Float16 b) { return float(a) / float(b); }
  friend Float16& operator+=(Float16& a, Float16 b) { return a = a + b; }
  friend Float16& operator-=(Float16& a, Float16 b) { return a = a - b; }
  friend Float16& operator*=(Float16& a, Float16 b) { return a = a * b; }
  friend Float16& operator/=(Float16& a, Float16 b) { return a = a / b; }

  std::uint16_t bits;  // use __bfloat16_as_ushort or __half_as_ushort: nvcc's types have no such member
};

// Two 16-bit floats. "low" is x, at the lower address.
template <class Format>
struct alignas(4) Float16Pair {
  Float16<Format> x, y;
  Float16Pair() = default;
  Float16Pair(Float16<Format> x, Float16<Format> y) : x(x), y(y) {}
  friend float __low2float(Float16Pair pair) { return pair.x; }
  friend float __high2float(Float16Pair pair) { return pair.y; }
};

}  // namespace cpu
