// What a run says about its steps: a line on the terminal, an object for metrics.jsonl, a summary at the end.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "runtime/bill.h"
#include "runtime/ceilings.h"
#include "runtime/metrics.h"

// What a step came to.
struct StepResult {
  size_t step;  // updates done, from 1
  double loss, norm, rate, seconds;
  bool applied;       // false: the update was left out
  double loss_scale;  // for the next step; 0: none is used
};

// What a rank sent in a step.
struct StepTraffic {
  std::map<std::string, double> bytes;        // by collective
  double milliseconds, exposed_milliseconds;  // in collectives; the part in which the device did nothing else
  std::vector<std::string> of_ranks;          // text_of() each rank's, where they were gathered, else empty texts or none
};

// The run went back `from` a step `to` an earlier one. What followed that one until now is left out: these samples, in
// the order in which they are taken.
struct Rollback {
  size_t to, from, first_sample, last_sample;
  std::string reason;
};

// As ranks tell one another, without of_ranks.
std::string text_of(const StepTraffic& traffic);

class Report {
 public:
  // tokens, flops: of a step; peak: FLOP/s of all devices, 0 if not known; metrics: metrics.jsonl of a run that has done
  // `start` steps (which its first line creates: a run that fails before leaves nothing behind), empty: none is written
  Report(size_t steps, double tokens, double flops, double peak, const std::filesystem::path& metrics, size_t start);

  // traffic: none if there is one rank; printed: also on the terminal
  void step(const StepResult& s, const std::optional<StepTraffic>& traffic, const Bill& bill, bool printed,
            double seconds_left);

  void validation(size_t step, double loss, const Bill& bill);

  void rollback(const Rollback& r, const Bill& bill);

  // Writes what metrics.jsonl has not got yet; fails if that can't be done.
  void finish();

  // What went wrong with a step, and what was done about it.
  void print_incident(const StepResult& s, const std::string& reason, const std::string& consequence) const;

  // Of `steps` steps in this run.
  void print_summary(size_t steps, double shortest_s, double seconds) const;

 private:
  nlohmann::ordered_json metrics(const StepResult& s) const;
  void print(const StepResult& s, const std::optional<StepTraffic>& traffic, double seconds_left) const;
  void log(const nlohmann::ordered_json& fields);

  size_t steps_;
  double tokens_, flops_, peak_;
  std::optional<MetricsLog> log_;
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
