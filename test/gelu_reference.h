// GELU by tanh, and its derivative, in float64.
#pragma once

#include <cmath>

inline double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// The derivative by differences, so that a mistake in its formula is not made twice; off by about 1e-9.
inline double gelu_slope(double x) {
  const double h = 1e-4;
  return (gelu(x + h) - gelu(x - h)) / (2 * h);
}
