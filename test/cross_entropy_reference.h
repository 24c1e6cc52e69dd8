// Cross-entropy and its gradient in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

// A matrix of logits (rows, padded), of whose columns the first `vocabulary` are tokens.
struct LogitRows {
  int rows, vocabulary, padded;
};

struct CrossEntropyReference {
  std::vector<double> losses, gradients;  // (rows), (rows, padded)
};

inline CrossEntropyReference cross_entropy_reference(const std::vector<double>& logits, const std::vector<int>& targets,
                                                     const LogitRows& s, double loss_scale) {
  CrossEntropyReference r = {std::vector<double>(s.rows), std::vector<double>(logits.size())};
  for (int row = 0; row < s.rows; ++row) {
    const double* z = &logits[size_t(row) * s.padded];
    double* gradient = &r.gradients[size_t(row) * s.padded];
    const double maximum = *std::max_element(z, z + s.vocabulary);
    double sum = 0;
    for (int v = 0; v < s.vocabulary; ++v) sum += std::exp(z[v] - maximum);
    r.losses[row] = std::log(sum) + maximum - z[targets[row]];
    for (int v = 0; v < s.vocabulary; ++v)
      gradient[v] = (std::exp(z[v] - maximum) / sum - (v == targets[row])) * loss_scale;
  }
  return r;
}

// Random targets, the first and the last token among them.
inline std::vector<int> random_targets(const LogitRows& s) {
  std::mt19937 generator(4);
  std::vector<int> targets(s.rows);
  for (int& target : targets) target = generator() % s.vocabulary;
  targets.back() = 0;
  targets.front() = s.vocabulary - 1;
  return targets;
}

// Takes the targets' elements out of a (rows, padded) matrix.
inline std::vector<double> take_targets(std::vector<double>& matrix, const std::vector<int>& targets, int padded) {
  std::vector<double> taken;
  for (size_t row = 0; row < targets.size(); ++row)
    taken.push_back(std::exchange(matrix[row * padded + targets[row]], 0));
  return taken;
}
