// cuda_fp16.h for the CPU device: __half, the 16-bit float of IEEE 754 (binary16), and its CUDA functions.
//
//   float  1 sign, 8 exponent (bias 127), 23 mantissa bits
//   half   1 sign, 5 exponent (bias 15),  10 mantissa bits: up to 65,504, normal from 2^-14, smallest 2^-24
//
// Names and results are those of the CUDA Math API ("Half Precision Conversion and Data Movement"): rounding
// to nearest even unless a name ends in _rz (toward zero); any NaN becomes 0x7fff; 65,520 and more become
// infinity; subnormals are kept. An operation is done in float and its result rounded: this is the correctly
// rounded result, as on the GPU (24 >= 2*11 + 2 bits: Figueroa, "When is double rounding innocuous?", 1995).
// One difference: a double is rounded to float first, where CUDA rounds it once.
//
// Conversions have no branches, so that g++ makes vector code of a loop over an array.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cpu/vector_types.h"

struct alignas(2) __half {
  __half() = default;
  __half(const __half&) = default;
  inline __half(float value);
  inline operator float() const;

  // The same as the default, but that is a struct copy to g++ 12, and loops with struct copies stay scalar.
  __half& operator=(const __half& other) {
    bits = other.bits;
    return *this;
  }

  std::uint16_t bits;  // use __half_as_ushort: nvcc's type has no such member
};

struct alignas(4) __half2 {
  __half x, y;
  __half2() = default;
  __half2(const __half& x, const __half& y) : x(x), y(y) {}
};

using half = __half;
using half2 = __half2;

inline __half __ushort_as_half(unsigned short bits) {
  __half result;
  result.bits = bits;
  return result;
}

inline unsigned short __half_as_ushort(__half value) { return value.bits; }

namespace cpu {

// A float's magnitude, seen as an integer to be shifted right and rounded into a half's 15 lower bits.
//
//   normal half     exponent rebased from 127 to 15, then the mantissa loses 23 - 10 = 13 bits
//   subnormal half  mantissa with its leading 1, in units of 2^(exponent - 150), to units of 2^-24
struct HalfParts {
  std::uint32_t sign, magnitude;  // of the float; sign already at the half's bit 15
  std::uint32_t value, shift;

  explicit HalfParts(float from) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(from);
    sign = bits >> 16 & 0x8000;
    magnitude = bits & 0x7fffffff;
    const bool is_subnormal = magnitude < (127 - 14) << 23;
    value = is_subnormal ? (magnitude & 0x7fffff) | 0x800000 : magnitude - ((127 - 15) << 23);
    shift = is_subnormal ? std::min(126 - (magnitude >> 23), 31u) : 13;  // 25 and more leave nothing
  }

  // `overflow` is what a finite value too large becomes: infinity, or the largest half.
  __half assemble(std::uint32_t rounded, std::uint32_t overflow) const {
    const std::uint32_t finite = sign | std::min(rounded, overflow);
    const std::uint32_t special = magnitude == 0x7f800000 ? sign | 0x7c00 : 0x7fff;
    return __ushort_as_half(magnitude < 0x7f800000 ? finite : special);
  }
};

}  // namespace cpu

// To nearest: adding almost half a unit carries if the lost bits are above one half; the extra 1 carries a
// tie upward if the result would be odd. A carry out of the mantissa increments the exponent, as it should.
inline __half __float2half_rn(float value) {
  const cpu::HalfParts parts(value);
  const std::uint32_t almost_half = (1u << (parts.shift - 1)) - 1;
  const std::uint32_t odd = parts.value >> parts.shift & 1;
  return parts.assemble((parts.value + almost_half + odd) >> parts.shift, 0x7c00);
}

inline __half __float2half_rz(float value) {
  const cpu::HalfParts parts(value);
  return parts.assemble(parts.value >> parts.shift, 0x7bff);
}

inline __half __float2half(float value) { return __float2half_rn(value); }

inline float __half2float(__half value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fff;
  const std::uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
  // A subnormal is an integer times 2^-24: conversion and product are exact, and its float is normal.
  const float subnormal = static_cast<float>(static_cast<int>(magnitude)) * 0x1p-24f;
  const std::uint32_t finite = magnitude < 0x400 ? std::bit_cast<std::uint32_t>(subnormal) : normal;
  const std::uint32_t number = sign | (magnitude < 0x7c00 ? finite : 0x7f800000);
  return std::bit_cast<float>(magnitude > 0x7c00 ? 0x7fffffff : number);
}

inline __half::__half(float value) : bits(__float2half_rn(value).bits) {}
inline __half::operator float() const { return __half2float(*this); }

inline __half operator-(__half a) { return __ushort_as_half(a.bits ^ 0x8000); }
inline __half operator+(__half a, __half b) { return float(a) + float(b); }
inline __half operator-(__half a, __half b) { return float(a) - float(b); }
inline __half operator*(__half a, __half b) { return float(a) * float(b); }
inline __half operator/(__half a, __half b) { return float(a) / float(b); }
inline __half& operator+=(__half& a, __half b) { return a = a + b; }
inline __half& operator-=(__half& a, __half b) { return a = a - b; }
inline __half& operator*=(__half& a, __half b) { return a = a * b; }
inline __half& operator/=(__half& a, __half b) { return a = a / b; }

// Pairs. "low" is x, at the lower address.
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half value) { return {value, value}; }
inline __half2 __float2half2_rn(float value) { return {value, value}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 value) { return {value.x, value.y}; }
inline float2 __half22float2(__half2 value) { return {value.x, value.y}; }
inline __half __low2half(__half2 value) { return value.x; }
inline __half __high2half(__half2 value) { return value.y; }
inline float __low2float(__half2 value) { return value.x; }
inline float __high2float(__half2 value) { return value.y; }
