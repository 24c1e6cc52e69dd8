// What a run has cost so far: hours, the part of them that was no training, and money. Counted over restarts: a resumed
// run goes on from the last line of metrics.jsonl, those included that the checkpoint does not know of. (What a start
// does after its last line, the last checkpoint, is not carried on.) What was paid before stays as it was, though the
// run may go on with more devices or at another price. Device-hours that ran without a price cost nobody knows what:
// they are counted apart.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>

#include <nlohmann/json_fwd.hpp>

class Bill {
 public:
  // price: of a rank's device for an hour; 0: not known
  Bill(double price, int devices) : price_(price), devices_(devices) {}

  // Seconds in which training stood still, or did what was undone.
  struct Lost {
    double checkpoints = 0, evaluation = 0, data = 0;
    double rollbacks = 0;  // steps that were undone, and the way back
    double restarts = 0;   // steps trained once more
  } lost;

  // Reads what was spent by the run that left these metrics, of which steps up to `step` are kept.
  void restore(const std::filesystem::path& metrics, size_t step);

  // A rollback undoes what these metrics say of steps after `step`; going back took `seconds`.
  void add_rollback(const std::filesystem::path& metrics, size_t step, double seconds);

  // For a line of metrics.
  void add_to(nlohmann::ordered_json& metrics) const;

  // tokens, flops: of the whole run so far; peak: FLOP/s of a device, 0 if not known; seconds_left: to the last step
  void print(double tokens, double flops, double peak, double seconds_left) const;

 private:
  struct Spent {
    double hours = 0, device_hours = 0, unpriced_device_hours = 0, cost = 0;
  };
  Spent spent() const;

  double price_;
  int devices_;
  Spent before_;  // by earlier starts
  size_t restarts_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};
