// How Hopper's tensor cores add up products of numbers in eight bits, with GPT_CPU_SUMS=hopper.
//
// An instruction (wgmma, k = 32) adds 32 products to a sum. All 33 numbers are aligned to the largest exponent among them,
// where the exponent of a product is the sum of its factors' exponents, and each is cut off 13 bits below it, towards zero.
// Their sum is exact, and is cut off 13 bits below its own exponent. So a sum keeps 14 bits (DeepSeek-V3,
// arXiv:2412.19437, section 3.3.2). These rules reproduce what an H200 computed: the largest errors of six products have
// the card's value in all digits that it printed (test/test_fp8.cu, "sums have the errors of an H200").
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/gemm/gemm_shape.h"

namespace cpu {

constexpr int products_of_an_instruction = 32, kept_bits = 13;

// x towards zero, to a multiple of 2^(exponent - kept_bits).
inline double cut_off(double x, int exponent) {
  const double unit = std::ldexp(1.0, exponent - kept_bits);
  return std::trunc(x / unit) * unit;
}

inline int exponent_of(float factor, Fp8Format format) {
  return std::max(std::ilogb(factor), format == Fp8Format::e4m3 ? -6 : -14);  // of numbers that are not normal: the least
}

// sum + Σ a[i]·b[i], i < count, as one instruction computes it. What is not finite stays so.
inline float add_products(float sum, const float* a, Fp8Format format_a, const float* b, Fp8Format format_b, int count) {
  int largest = sum == 0 ? INT_MIN : std::ilogb(sum);
  double exact = sum;
  for (int i = 0; i < count; ++i) {
    exact += double(a[i]) * b[i];
    if (a[i] != 0 && b[i] != 0) largest = std::max(largest, exponent_of(a[i], format_a) + exponent_of(b[i], format_b));
  }
  if (largest == INT_MIN || !std::isfinite(exact)) return float(exact);
  double total = cut_off(sum, largest);
  for (int i = 0; i < count; ++i) total += cut_off(double(a[i]) * b[i], largest);
  return total == 0 ? 0.0f : float(cut_off(total, std::ilogb(total)));
}

}  // namespace cpu
