// cuda_fp16.h for the CPU device: __half, the 16-bit float of IEEE 754 (binary16), and its CUDA functions.
//
//   float  1 sign, 8 exponent (bias 127), 23 mantissa bits
//   half   1 sign, 5 exponent (bias 15),  10 mantissa bits: up to 65,504, normal from 2^-14, smallest 2^-24
//
// CUDA Math API, "Half Precision Conversion and Data Movement"; cpu/float16.h has the rules and the operators. 65,520
// and more become infinity; subnormals are kept.
#pragma once

#include <algorithm>

#include "cpu/float16.h"

namespace cpu {

// A float's magnitude as an integer, which is shifted right and rounded to get a half's 15 lower bits.
//
//   normal half     exponent rebased from 127 to 15, then the mantissa loses 23 - 10 = 13 bits
//   subnormal half  mantissa with its leading 1, in units of 2^(exponent - 150), to units of 2^-24
struct HalfParts {
  std::uint32_t sign, magnitude;  // of the float; the sign is already at the half's bit 15
  std::uint32_t value, shift;

  explicit HalfParts(float from) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(from);
    sign = bits >> 16 & 0x8000;
    magnitude = bits & 0x7fffffff;
    const bool is_subnormal = magnitude < (127 - 14) << 23;
    value = is_subnormal ? (magnitude & 0x7fffff) | 0x800000 : magnitude - ((127 - 15) << 23);
    shift = is_subnormal ? std::min(126 - (magnitude >> 23), 31u) : 13;  // shifts of 25 and more leave zero
  }

  // overflow: the result for a finite value that is too large, infinity or the largest half.
  std::uint16_t assemble(std::uint32_t rounded, std::uint32_t overflow) const {
    const std::uint32_t finite = sign | std::min(rounded, overflow);
    const std::uint32_t special = magnitude == 0x7f800000 ? sign | 0x7c00 : 0x7fff;
    return magnitude < 0x7f800000 ? finite : special;
  }
};

struct Half {
  // Adding almost half a unit carries if the lost bits are above one half; the extra 1 carries a tie upward if the
  // result would be odd. A carry out of the mantissa increments the exponent, as it should.
  static std::uint16_t nearest(float value) {
    const HalfParts parts(value);
    const std::uint32_t almost_half = (1u << (parts.shift - 1)) - 1;
    const std::uint32_t odd = parts.value >> parts.shift & 1;
    return parts.assemble((parts.value + almost_half + odd) >> parts.shift, 0x7c00);
  }

  static std::uint16_t toward_zero(float value) {
    const HalfParts parts(value);
    return parts.assemble(parts.value >> parts.shift, 0x7bff);
  }

  static float to_float(std::uint16_t bits) {
    const std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16;
    const std::uint32_t magnitude = bits & 0x7fff;
    const std::uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
    // A subnormal is an integer times 2^-24: conversion and product are exact, and its float is normal.
    const float subnormal = static_cast<float>(static_cast<int>(magnitude)) * 0x1p-24f;
    const std::uint32_t finite = magnitude < 0x400 ? std::bit_cast<std::uint32_t>(subnormal) : normal;
    const std::uint32_t number = sign | (magnitude < 0x7c00 ? finite : 0x7f800000);
    return std::bit_cast<float>(magnitude > 0x7c00 ? 0x7fffffff : number);
  }
};

}  // namespace cpu

using __half = cpu::Float16<cpu::Half>;
using __half2 = cpu::Float16Pair<cpu::Half>;

inline __half __ushort_as_half(unsigned short bits) { return __half::from_bits(bits); }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __float2half_rn(float value) { return value; }
inline __half __float2half_rz(float value) { return __ushort_as_half(cpu::Half::toward_zero(value)); }
inline float __half2float(__half value) { return value; }

inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
