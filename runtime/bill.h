// What a run has cost so far: hours, the part of them that was no training, and money. Counted over restarts: a resumed
// run goes on from the last line of metrics.jsonl, those included that the checkpoint does not know of.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>

#include <nlohmann/json_fwd.hpp>

class Bill {
 public:
  // price: of a rank's device for an hour; 0: not known
  Bill(double price, int devices) : price_(price), devices_(devices) {}

  // Seconds in which training stood still.
  struct Lost {
    double checkpoints = 0, evaluation = 0, data = 0, restarts = 0;  // restarts: steps trained once more
    double sum() const { return checkpoints + evaluation + data + restarts; }
  } lost;

  // Reads what was spent by the run that left these metrics, of which steps up to `step` are kept.
  void restore(const std::filesystem::path& metrics, size_t step);

  double hours() const;
  double cost(double hours) const { return hours * devices_ * price_; }

  // For a line of metrics.
  void add_to(nlohmann::ordered_json& metrics) const;

  // tokens, flops: of the whole run so far; peak: FLOP/s of a device, 0 if not known; seconds_left: to the last step
  void print(double tokens, double flops, double peak, double seconds_left) const;

 private:
  double price_;
  int devices_;
  double before_s_ = 0;  // of earlier starts
  size_t restarts_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};
