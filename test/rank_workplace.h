// Tests of train_gpt on several ranks, as people run it: with mpirun, from a shell.
#pragma once

#include <cmath>

#include <doctest/doctest.h>

#include "test/bounds.h"
#include "test/workplace.h"

// $MPIRUN N starts N ranks. When one has failed, mpirun sends the others SIGTERM and would sleep for a second or two
// before SIGKILL, whether they are there or not; so they have to be through with what they do before the first one ends.
struct RankWorkplace : Workplace {
  RankWorkplace() {
    setenv("MPIRUN", mpirun(" --mca odls_base_sigkill_timeout 0").c_str(), 1);
    setenv("OMP_NUM_THREADS", "1", 1);
  }
  ~RankWorkplace() { unsetenv("OMP_NUM_THREADS"); }

  // Among what mpirun says about the end of a job there is exactly one line of ours; it holds all the parts.
  void ranks_refuse(const std::string& command, const Texts& parts, int code = 1) const {
    CAPTURE(command);
    const Result result = (*this)(command);
    CAPTURE(result.error);
    CHECK(result.code == code);
    Texts ours;
    std::istringstream lines(result.error);
    for (std::string line; std::getline(lines, line);)
      if (line.starts_with("train_gpt: ")) ours.push_back(line);
    REQUIRE(ours.size() == 1);
    for (const std::string& part : parts) CHECK_MESSAGE(contains(ours[0], part), part);
  }
};

// Lines of metrics.jsonl without what two runs with the same bits may differ in: how numbers travelled, and when.
inline std::vector<Json> without_traffic(std::vector<Json> lines) {
  for (Json& line : lines)
    for (const char* traffic : {"comm_bytes", "comm_bytes_by_group", "comm_ms", "comm_exposed_ms", "ranks"}) line.erase(traffic);
  return lines;
}

// The largest relative difference of a number that both runs have at each step.
inline double largest_difference(const std::vector<Json>& a, const std::vector<Json>& b, const char* key) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i]["step"] == b[i]["step"]);
    const double x = a[i][key], y = b[i][key];
    largest = std::max(largest, std::abs(x - y) / std::abs(y));
  }
  return largest;
}
