// --shares auto: how many micro-batches of a step each data-parallel rank takes. First by the rank check's products, or as a
// checkpoint of the same number of ranks says; then by the times of the first ten steps.
#pragma once

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "gpt/base/text.h"
#include "gpt/job.cuh"

// The shares that fit these times. seconds: this rank's time for a micro-batch. Ranks that share micro-batches (--tp, --cp)
// count with the slowest of them. Collective: all ranks get the same.
inline std::vector<int> shares_by_time(const Job& job, double seconds) {
  std::vector<double> of_ranks(size_t(job.mesh.shape().dp));
  for (const std::string& told : job.ranks.all_gather(concat(job.mesh.place().dp, ' ', seconds))) {
    size_t rank = 0;
    double time = 0;
    std::istringstream(told) >> rank >> time;
    of_ranks[rank] = std::max(of_ranks[rank], time);
  }
  return fair_counts(of_ranks, job.options.global_batch / job.options.micro_batch);
}
