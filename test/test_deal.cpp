// Micro-batches dealt to data-parallel ranks (gpt/deal.h), beside the rule written out, and beside all other deals.
#include <algorithm>
#include <vector>

#include <doctest/doctest.h>

#include "gpt/deal.h"

namespace {

// Goes through the micro-steps, and gives the next micro-batch to each rank that still takes one.
std::vector<std::vector<int>> written_out(const std::vector<int>& counts) {
  std::vector<std::vector<int>> of_ranks(counts.size());
  int next = 0;
  for (int micro_step = 0; micro_step < std::ranges::max(counts); ++micro_step)
    for (size_t rank = 0; rank < counts.size(); ++rank)
      if (counts[rank] > micro_step) of_ranks[rank].push_back(next++);
  return of_ranks;
}

double last_end(const std::vector<double>& seconds, const std::vector<int>& counts) {
  double last = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) last = std::max(last, seconds[rank] * counts[rank]);
  return last;
}

}  // namespace

TEST_CASE("each micro-batch of a step is dealt once, in the order of ranks") {
  for (const std::vector<int>& counts : {std::vector{3, 3, 2}, {4}, {2, 2, 2, 2}, {1, 5}, {5, 1}, {1, 2, 3, 4}}) {
    const Deal deal(counts);
    CHECK(deal.most() == std::ranges::max(counts));
    const auto wanted = written_out(counts);
    for (int rank = 0; rank < int(counts.size()); ++rank)
      for (int micro_step = 0; micro_step < deal.of_rank(rank); ++micro_step)
        CHECK(deal.number(rank, micro_step) == wanted[size_t(rank)][size_t(micro_step)]);
  }
  const Deal equal({3, 3, 3, 3});
  for (int rank = 0; rank < 4; ++rank)
    for (int micro_step = 0; micro_step < 3; ++micro_step) CHECK(equal.number(rank, micro_step) == 4 * micro_step + rank);
}

TEST_CASE("--shares auto: no other deal is done earlier") {
  for (const std::vector<double>& seconds : {std::vector{1.0, 1.0, 1.0}, {1.0, 2.0, 4.0}, {0.3, 0.7, 0.9}, {1.0, 9.0, 1.1}})
    for (int all = 3; all <= 14; ++all) {
      const std::vector<int> counts = fair_counts(seconds, all);
      CHECK(Deal(counts).all() == all);
      CHECK(std::ranges::min(counts) >= 1);
      for (int first = 1; first <= all - 2; ++first)
        for (int second = 1; first + second < all; ++second)
          CHECK(last_end(seconds, counts) <= last_end(seconds, {first, second, all - first - second}));
    }
}
