// The bound of an error. test/README.md has all of them: where each comes from, and how much of it is ever used.
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
