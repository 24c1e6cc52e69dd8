// The bound of an error. test/tolerances.md has all of them: where each comes from, and how much of it is ever used.
//
// About, for values that a test computes in another way: value == about(wanted, bound) where |value - wanted| is at most
// bound*|wanted|. (doctest::Approx adds 1 to |wanted|: to it, 1e-6 and 2e-6 are the same.)
//
// With GPT_SHARES=FILE in the environment, tests write there which share of each bound their errors take, so that the
// table can be made again on any machine:
//
//   program <tab> test case: quantity <tab> error / bound
#pragma once

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <ostream>
#include <string>

// error / bound; infinite for what is no number. The largest so far of each quantity are written to the file.
inline double share_of_bound(const std::string& quantity, double error, double bound) {
  double share = error == 0 ? 0 : std::abs(error) / bound;
  if (std::isnan(share)) share = INFINITY;
  static const char* name = std::getenv("GPT_SHARES");
  static std::FILE* file = name ? std::fopen(name, "a") : nullptr;
  static std::map<std::string, double> largest;
  if (file && (!largest.count(quantity) || share > largest[quantity])) {
    largest[quantity] = share;
    std::fprintf(file, "%s\t%s\t%.3g\n", program_invocation_short_name, quantity.c_str(), share);
    std::fflush(file);
  }
  return share;
}

// CHECK_WITHIN(quantity, error, bound), in a test case of doctest.
#define CHECK_WITHIN(quantity, ...)                                                                           \
  CHECK(share_of_bound(doctest::getContextOptions()->currentTest->m_name + std::string(": ") + (quantity), \
                       __VA_ARGS__) <= 1)

struct About {
  double wanted, bound;
  friend bool operator==(double value, const About& about) {
    return value == about.wanted || std::abs(value - about.wanted) <= about.bound * std::abs(about.wanted);
  }
  friend std::ostream& operator<<(std::ostream& out, const About& about) {
    return out << about.wanted << " ± " << about.bound * std::abs(about.wanted);
  }
};
// The usual bound: a value rounded to float32 a few times.
inline About about(double wanted, double bound = 1e-6) { return {wanted, bound}; }

// ---- sums
//
// How far a sum of n terms may be off. Terms are of size 1 and of random sign, so that the sum is of size √n; each error
// below is a share of √n + |sum|. (Where terms differ in size, √n is the root of the sum of their squares.)

// In float, one addition after the other: addition i rounds a running sum of size √i by 3.4e-8 of it (the root-mean-square),
// together 2.4e-8·n. Ten times that: the worst of 10^6 elements is at five where n is large, and at ten where a few large
// products make all of the sum. (TF32 is off by 4e-4·√n.)
//
// Tensor cores do not round. They take b products (8 on an A100, 16 on an H100) and the running sum at once, shift all of
// them to the exponent of the largest, cut off what lies behind float's last bit (on an A100 and an H100 one and two bits
// further), add, and cut the result to a float (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor
// cores", PeerJ Computer Science 7:e330, 2021; Khattak, Mikaitis, "Accurate models of NVIDIA tensor cores",
// arXiv:2512.07004, whose models have the bits of these cards). Two errors follow:
//   - A product's cut is at most 2^-23 of the largest, 0.58 of that in root-mean-square, of random sign: 4.9e-8·n in all
//     without the bits beyond float's. Five times that, for the worst element, is 2.4e-7·n again.
//   - A sum's cut is 0.72·2^-24 of it in the mean, always towards zero, so n/b cuts of sums of size √(b·i) add up:
//     2.9e-8·n^1.5/b. With b = 8 that is 3.6e-9·n of √n.
inline double float_sum_error(double n) { return 2.4e-7 * std::sqrt(n); }
inline double tensor_core_sum_error(double n) { return float_sum_error(n) + 3.6e-9 * n; }

// Products of eight-bit numbers, on Ada's and Hopper's tensor cores: 32 at a time, cut 13 bits behind the leading bit of
// the largest (DeepSeek-V3, arXiv:2412.19437, section 3.3.2, calls it 14 bits; Khattak and Mikaitis as above). The largest
// of the products and of the running sum is at most √n + |sum|, so a cut is 2^-13 of that at most.
//   - n products: 0.58·√n of it in root-mean-square; five times that for the worst element
//   - n/32 sums: half of it each, towards zero
//   - the last sum: all of it
// A product that adds to a float every few steps (matmul.cuh: without fast_sums) cuts smaller sums, so it stays within this.
// The CPU device adds in float, or by these rules (GPT_CPU_SUMS=hopper; cpu/tensor_core_sums.h, whose errors are an H200's).
inline double eight_bit_tensor_core_sum_error(double n) { return 0x1p-13 * (2.9 * std::sqrt(n) + n / 64 + 1); }
inline bool eight_bit_sums_have_14_bits() {
#ifdef __NVCC__
  return true;
#else
  const char* const sums = std::getenv("GPT_CPU_SUMS");
  return sums && std::string(sums) == "hopper";
#endif
}
inline double eight_bit_sum_error(double n) { return eight_bit_sums_have_14_bits() ? eight_bit_tensor_core_sum_error(n) : float_sum_error(n); }

// Attention: float sums of `keys` and head_size terms: √keys and √head_size roundings of 6e-8, three times that for the
// worst of all elements, five times for products of head_size, which tensor cores cut instead of rounding.
inline double attention_sum_error(int keys, int head_size) {
  return 2e-7 * std::sqrt(double(keys)) + 3e-7 * std::sqrt(double(head_size));
}

// What an element of a product D = A·B [+ bias] [+ D] may be off by, whose sum is off by sum_error (above; size: √n). It is
// rounded to D's type by `rounding` of itself. `before`: what may be rounded to D's type before it. That is 0 where D is only
// written. Where a product adds to D, the order is the library's, which may round A·B first; and where the library's epilogue
// has no bias, bias + D is rounded first (kernels/gemm/bias.cuh): |A·B| + |bias| + |D| is at least that. (An H200 exceeded
// the bound without it by up to 1.39 in bf16 and in fp16, and only in products that add.)
inline double product_error(double sum_error, double rounding, double result, double size, double before = 0) {
  return sum_error * (size + std::abs(result)) + rounding * (std::abs(result) + before);
}
