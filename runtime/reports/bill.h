// The cost of a run so far: hours, the part of them that was not training, and money. It is counted over restarts: a
// resumed run goes on from the last line of metrics.jsonl, even if that is later than the checkpoint. (Time after the
// last line, such as the last checkpoint's, is lost from the bill.) Costs of earlier starts do not change if the
// run goes on with more devices or at another price. Device-hours without a known price are counted separately.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>

#include <nlohmann/json_fwd.hpp>

class Bill {
 public:
  // price: of one device for an hour; 0: not known
  Bill(double price, int devices) : price_(price), devices_(devices) {}

  // Seconds in which training waited, or computed steps that were undone.
  struct Lost {
    double checkpoints = 0, evaluation = 0, data = 0;
    double rollbacks = 0;  // steps that were undone, and loading the checkpoint
    double restarts = 0;   // steps that were trained again after a restart
  } lost;
  size_t failed_hooks = 0;  // of this start

  // Reads the costs of earlier starts from their metrics. Steps up to `step` are kept; the others are trained again.
  void restore(const std::filesystem::path& metrics, size_t step);

  // Adds a rollback: the time that these metrics list for steps after `step`, and `seconds` for loading the checkpoint.
  void add_rollback(const std::filesystem::path& metrics, size_t step, double seconds);

  // Adds the bill to a line of metrics.
  void add_to(nlohmann::ordered_json& metrics) const;

  // tokens, flops: of the whole run so far; peak: FLOP/s of one device, 0 if not known; seconds_left: until the last
  // step
  void print(double tokens, double flops, double peak, double seconds_left) const;

 private:
  struct Spent {
    double hours = 0, device_hours = 0, unpriced_device_hours = 0, cost = 0;
  };
  Spent spent() const;

  double price_;
  int devices_;
  Spent before_;  // costs of earlier starts
  size_t restarts_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};
