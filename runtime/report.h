// What a run says about its steps: a line on the terminal, an object for metrics.jsonl, a summary at the end.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "runtime/ceilings.h"

// What a step came to.
struct StepResult {
  size_t step;  // updates done, from 1
  double loss, norm, rate, seconds;
  bool applied;       // false: the update was left out
  double loss_scale;  // for the next step; 0: none is used
};

class Report {
 public:
  // tokens, flops: of a step; peak: FLOP/s of all devices, 0 if not known
  Report(size_t steps, double tokens, double flops, double peak);

  nlohmann::ordered_json metrics(const StepResult& s) const;

  // metrics: of the step, with what ranks sent if there are several
  void print(const StepResult& s, const nlohmann::ordered_json& metrics, double seconds_left) const;

  // What went wrong with a step, and what was done about it.
  void print_incident(const StepResult& s, const std::string& reason, const std::string& consequence) const;

  // Of `steps` steps in this run.
  void print_summary(size_t steps, double shortest_s, double seconds) const;

 private:
  size_t steps_;
  double tokens_, flops_, peak_;
};

// What a run spent in a kernel.
struct KernelTotal {
  std::string name;
  size_t calls;
  double milliseconds, bytes, flops;
};

// totals: of `steps` steps. "of ceiling": the shortest time in which the device could move a kernel's bytes and do its
// FLOPs, as a share of the time it took.
void print_profile(std::vector<KernelTotal> totals, size_t steps, const std::optional<Ceilings>& ceilings);
