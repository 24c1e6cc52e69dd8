// How Hopper's tensor cores add up products of numbers in eight bits, with GPT_CPU_SUMS=hopper.
//
// An instruction (wgmma, k = 32) adds 32 products to a sum. All 33 numbers are aligned to the largest exponent among them,
// where the exponent of a product is the sum of its factors' exponents, and each is cut off 13 bits below it, towards zero.
// Their sum is exact, and is cut off 13 bits below its own exponent. So a sum keeps 14 bits (DeepSeek-V3,
// arXiv:2412.19437, section 3.3.2). These rules reproduce an H200's results: the largest errors of six products have
// the card's value in all digits that it printed (test/fp8/test_fp8.cu, "sums have the errors of an H200").
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>

namespace cpu {

constexpr int products_of_an_instruction = 32, kept_bits = 13;

// x towards zero, to a multiple of 2^(exponent - kept_bits).
inline double cut_off(double x, int exponent) {
  const double unit = std::ldexp(1.0, exponent - kept_bits);
  return std::trunc(x / unit) * unit;
}

// Neighbouring numbers of a matrix in eight bits.
struct Factors {
  const float* values;
  int least_exponent;  // of the format: subnormal numbers have it, too
  int exponent(int i) const { return std::max(std::ilogb(values[i]), least_exponent); }
};

// sum + Σ a[i]·b[i], i < count, as one instruction computes it. Non-finite numbers stay non-finite.
inline float add_products(float sum, const Factors& a, const Factors& b, int count) {
  int largest = sum == 0 ? INT_MIN : std::ilogb(sum);
  double exact = sum;
  for (int i = 0; i < count; ++i) {
    const double product = double(a.values[i]) * b.values[i];
    exact += product;
    if (product != 0) largest = std::max(largest, a.exponent(i) + b.exponent(i));
  }
  if (largest == INT_MIN || !std::isfinite(exact)) return float(exact);
  double total = cut_off(sum, largest);
  for (int i = 0; i < count; ++i) total += cut_off(double(a.values[i]) * b.values[i], largest);
  return total == 0 ? 0.0f : float(cut_off(total, std::ilogb(total)));
}

}  // namespace cpu
