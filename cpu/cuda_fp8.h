// cuda_fp8.h for the CPU device: __nv_fp8_e4m3 and __nv_fp8_e5m2 (Micikevicius et al., arXiv:2209.05433), and the
// functions that convert to them.
//
//   e4m3  1 sign, 4 exponent (bias 7),  3 mantissa bits: up to 448, normal from 2^-6, smallest 2^-9; NaN, no infinity
//   e5m2  1 sign, 5 exponent (bias 15), 2 mantissa bits: up to 57,344, normal from 2^-14, smallest 2^-16; the
//         upper byte of a half
//
// CUDA Math API, "FP8 Conversion and Data Movement". Floats are rounded to nearest even. With __NV_SATFINITE, the only
// way here, numbers out of range become the largest one, infinity too; any NaN becomes 0x7f. No conversion has
// branches, so that g++ vectorises loops over arrays.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/vector_types.h"

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
enum __nv_saturation_t { __NV_SATFINITE = 1 };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

namespace cpu {

// bias: of the exponent; last: the code of the largest number
template <int mantissa_bits, int bias, std::uint32_t last>
struct Float8 {
  static constexpr int dropped = 23 - mantissa_bits;  // bits of a float's mantissa
  static constexpr std::uint32_t rebase = std::uint32_t(127 - bias) << 23;  // the difference of the exponents' biases
  static constexpr std::uint32_t most = (last << dropped) + rebase;         // the largest number, as bits of a float

  static std::uint8_t nearest(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffff;
    const std::uint32_t clamped = magnitude < most ? magnitude : most;
    // Rounds as for 16 bits (cpu/cuda_bf16.h): almost half a unit is added, and 1 more if the result would be odd.
    const std::uint32_t normal = (clamped - rebase + (1u << (dropped - 1)) - 1 + (clamped >> dropped & 1)) >> dropped;
    // The last bit of 2^(24 - bias - mantissa_bits) is the unit of a subnormal: adding it rounds to that unit.
    constexpr std::uint32_t shifter = std::uint32_t(127 + 24 - bias - mantissa_bits) << 23;
    const float sum = std::bit_cast<float>(clamped) + std::bit_cast<float>(shifter);
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(sum) - shifter;
    const std::uint32_t number = clamped < rebase + (1u << 23) ? subnormal : normal;
    return std::uint8_t(magnitude > 0x7f800000 ? 0x7f : number | (bits >> 24 & 0x80));
  }

  static float to_float(std::uint8_t code) {
    const std::uint32_t sign = std::uint32_t(code & 0x80) << 24, magnitude = code & 0x7f;
    constexpr float unit = std::bit_cast<float>(std::uint32_t(127 + 1 - bias - mantissa_bits) << 23);
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(float(int(magnitude)) * unit);
    const std::uint32_t finite = magnitude < (1u << mantissa_bits) ? subnormal : (magnitude << dropped) + rebase;
    const bool is_infinite = mantissa_bits == 2 && magnitude == 0x7c;
    return std::bit_cast<float>(magnitude <= last ? sign | finite : is_infinite ? sign | 0x7f800000 : 0x7fffffff);
  }
};
using E4M3 = Float8<3, 7, 0x7e>;
using E5M2 = Float8<2, 15, 0x7b>;

template <class Format>
struct Float8Type {
  Float8Type() = default;
  explicit Float8Type(float value) : __x(Format::nearest(value)) {}
  explicit operator float() const { return Format::to_float(__x); }

  __nv_fp8_storage_t __x;
};

}  // namespace cpu

using __nv_fp8_e4m3 = cpu::Float8Type<cpu::E4M3>;
using __nv_fp8_e5m2 = cpu::Float8Type<cpu::E5M2>;

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t format) {
  return format == __NV_E4M3 ? cpu::E4M3::nearest(x) : cpu::E5M2::nearest(x);
}
// x in the lower byte
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t s, __nv_fp8_interpretation_t format) {
  return __nv_fp8x2_storage_t(__nv_cvt_float_to_fp8(x.x, s, format) | __nv_cvt_float_to_fp8(x.y, s, format) << 8);
}
