// --shares auto: how many micro-batches of a step each data-parallel rank takes. First by the rank check's products, or as a
// checkpoint of as many ranks says; then by what the first ten steps of the start took.
#pragma once

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "gpt/base/text.h"
#include "gpt/job.cuh"

// The numbers that fit these times. seconds: of this rank for a micro-batch. Ranks that share micro-batches (--tp, --cp) are as
// slow as the slowest. Collective: all ranks get the same.
inline std::vector<int> shares_by_time(const Job& job, double seconds) {
  std::vector<double> of_ranks(size_t(job.mesh.shape().dp));
  for (const std::string& told : job.control.all_gather(concat(job.mesh.place().dp, ' ', seconds))) {
    size_t rank = 0;
    double time = 0;
    std::istringstream(told) >> rank >> time;
    of_ranks[rank] = std::max(of_ranks[rank], time);
  }
  return fair_counts(of_ranks, job.options.global_batch / job.options.micro_batch);
}

// "3, 3, 2"; of many ranks neighbours with the same number are counted: "128 x 3, 128 x 1".
inline std::string shares_text(const std::vector<int>& shares) {
  std::string text;
  for (size_t i = 0, count = 1; i < shares.size(); i += count, count = 1) {
    while (shares.size() > 8 && i + count < shares.size() && shares[i + count] == shares[i]) ++count;
    text += (text.empty() ? "" : ", ") + (shares.size() > 8 ? std::to_string(count) + " x " : "") + std::to_string(shares[i]);
  }
  return text;
}
