// cuda_bf16.h for the CPU device: __nv_bfloat16, a float cut to its upper 16 bits, and its CUDA functions.
//
//   float     1 sign, 8 exponent, 23 mantissa bits
//   bfloat16  1 sign, 8 exponent,  7 mantissa bits: the same range, 2 to 3 decimal digits
//
// CUDA Math API, "Bfloat16 Precision Conversion and Data Movement"; cpu/float16.h has the rules and the operators.
#pragma once

#include "cpu/float16.h"

namespace cpu {

struct BrainFloat {
  // Adding 0x7fff carries if the lower half is above one half; the extra 1 carries a tie upward if the result would be
  // odd. A carry out of the mantissa increments the exponent, up to infinity, as it should.
  static std::uint16_t nearest(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    return upper_half(bits, 0x7fff + (bits >> 16 & 1));
  }

  static std::uint16_t toward_zero(float value) { return upper_half(std::bit_cast<std::uint32_t>(value), 0); }

  static float to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t(bits) << 16); }

 private:
  // The upper half of a float's bits plus `rounding`. NaN is handled separately: adding would turn some NaNs into
  // numbers.
  static std::uint16_t upper_half(std::uint32_t bits, std::uint32_t rounding) {
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return is_nan ? 0x7fff : (bits + rounding) >> 16;
  }
};

}  // namespace cpu

using __nv_bfloat16 = cpu::Float16<cpu::BrainFloat>;
using __nv_bfloat162 = cpu::Float16Pair<cpu::BrainFloat>;

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16::from_bits(bits); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline __nv_bfloat16 __float2bfloat16_rz(float value) {
  return __ushort_as_bfloat16(cpu::BrainFloat::toward_zero(value));
}
inline float __bfloat162float(__nv_bfloat16 value) { return value; }

inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {pair.x, pair.y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) { return pair.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) { return pair.y; }
