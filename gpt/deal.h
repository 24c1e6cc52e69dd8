// Which micro-batches of a step each data-parallel rank computes.
//
// Rank r computes A(r) micro-batches, in micro-steps 0, 1, 2, ... Those of a micro-step are neighbours in the step: they are
// dealt in the order of ranks, to the ranks that still take one. With A = 3, 3, 2:
//
//   micro-step   rank 0   rank 1   rank 2
//   0            0        1        2
//   1            3        4        5
//   2            6        7        -
//
// Where all take the same number, rank r of N computes r, N + r, 2N + r, ... So a step has the same samples on every mesh.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

class Deal {
 public:
  // counts: A(r), at least 1 each
  explicit Deal(std::vector<int> counts) : counts_(std::move(counts)) {}

  const std::vector<int>& counts() const { return counts_; }
  int of_rank(int rank) const { return counts_[size_t(rank)]; }
  int all() const { return std::accumulate(counts_.begin(), counts_.end(), 0); }
  int most() const { return std::ranges::max(counts_); }

  // The number in the step of the micro-batch that a rank computes in a micro-step.
  int number(int rank, int micro_step) const {
    int number = 0;
    for (int other = 0; other < int(counts_.size()); ++other)
      number += std::min(of_rank(other), micro_step) + int(other < rank && of_rank(other) > micro_step);
    return number;
  }

 private:
  std::vector<int> counts_;
};

// Deals `all` micro-batches such that the rank that is done last is done as early as possible. seconds: of each rank for one
// micro-batch. Every rank gets at least one.
inline std::vector<int> fair_counts(const std::vector<double>& seconds, int all) {
  std::vector<int> counts(seconds.size(), 1);
  for (int left = all - int(counts.size()); left > 0; --left) {
    const auto end = [&](size_t rank) { return (counts[rank] + 1) * seconds[rank]; };  // with one more
    ++counts[std::ranges::min(std::views::iota(size_t(0), counts.size()), {}, end)];
  }
  return counts;
}

// "3, 3, 2"; of many ranks neighbours with the same number are counted: "128 x 3, 128 x 1".
inline std::string text_of_counts(const std::vector<int>& counts) {
  std::string text;
  for (size_t i = 0, count = 1; i < counts.size(); i += count, count = 1) {
    while (counts.size() > 8 && i + count < counts.size() && counts[i + count] == counts[i]) ++count;
    text += (text.empty() ? "" : ", ") + (counts.size() > 8 ? std::to_string(count) + " x " : "") + std::to_string(counts[i]);
  }
  return text;
}
