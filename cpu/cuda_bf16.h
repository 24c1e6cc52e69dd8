// cuda_bf16.h for the CPU device: __nv_bfloat16, a float cut to its upper 16 bits, and its CUDA functions.
//
//   float     1 sign, 8 exponent, 23 mantissa bits
//   bfloat16  1 sign, 8 exponent,  7 mantissa bits: the same range, 2 to 3 decimal digits
//
// Names and results are those of the CUDA Math API ("Bfloat16 Precision Conversion and Data Movement"):
// rounding to nearest even unless a name ends in _rz (toward zero); any NaN becomes 0x7fff; overflow becomes
// infinity. An operation is done in float and its result rounded: for normal numbers this is the correctly
// rounded result, as on the GPU (24 >= 2*8 + 2 bits: Figueroa, "When is double rounding innocuous?", 1995).
// One difference: a double is rounded to float first, where CUDA rounds it once.
//
// Conversions are integer arithmetic without branches, so that g++ makes vector code of a loop over an array.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/vector_types.h"

struct alignas(2) __nv_bfloat16 {
  __nv_bfloat16() = default;
  __nv_bfloat16(const __nv_bfloat16&) = default;
  inline __nv_bfloat16(float value);
  inline operator float() const;

  // The same as the default, but that is a struct copy to g++ 12, and loops with struct copies stay scalar.
  __nv_bfloat16& operator=(const __nv_bfloat16& other) {
    bits = other.bits;
    return *this;
  }

  std::uint16_t bits;  // use __bfloat16_as_ushort: nvcc's type has no such member
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __nv_bfloat162(const __nv_bfloat16& x, const __nv_bfloat16& y) : x(x), y(y) {}
};

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 result;
  result.bits = bits;
  return result;
}

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }

namespace cpu {

// Upper half of a float's bits plus `rounding`, which would turn some NaNs into numbers.
inline __nv_bfloat16 bfloat16_from_float_bits(std::uint32_t bits, std::uint32_t rounding) {
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return __ushort_as_bfloat16(is_nan ? 0x7fff : (bits + rounding) >> 16);
}

}  // namespace cpu

// To nearest: adding 0x7fff carries if the lower half is above one half; the extra 1 carries a tie upward if
// the result would be odd. A carry out of the mantissa increments the exponent, up to infinity, as it should.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  return cpu::bfloat16_from_float_bits(bits, 0x7fff + (bits >> 16 & 1));
}

inline __nv_bfloat16 __float2bfloat16_rz(float value) {
  return cpu::bfloat16_from_float_bits(std::bit_cast<std::uint32_t>(value), 0);
}

inline __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }

inline float __bfloat162float(__nv_bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline __nv_bfloat16::__nv_bfloat16(float value) : bits(__float2bfloat16_rn(value).bits) {}
inline __nv_bfloat16::operator float() const { return __bfloat162float(*this); }

inline __nv_bfloat16 operator-(__nv_bfloat16 a) { return __ushort_as_bfloat16(a.bits ^ 0x8000); }
inline __nv_bfloat16 operator+(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) + float(b); }
inline __nv_bfloat16 operator-(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) - float(b); }
inline __nv_bfloat16 operator*(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) * float(b); }
inline __nv_bfloat16 operator/(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) / float(b); }
inline __nv_bfloat16& operator+=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a + b; }
inline __nv_bfloat16& operator-=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a - b; }
inline __nv_bfloat16& operator*=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a * b; }
inline __nv_bfloat16& operator/=(__nv_bfloat16& a, __nv_bfloat16 b) { return a = a / b; }

// Pairs. "low" is x, at the lower address.
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
inline __nv_bfloat162 __float2bfloat162_rn(float value) { return {value, value}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) { return {value.x, value.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 value) { return {value.x, value.y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 value) { return value.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 value) { return value.y; }
inline float __low2float(__nv_bfloat162 value) { return value.x; }
inline float __high2float(__nv_bfloat162 value) { return value.y; }
