// The cost of a run so far: hours, the hours that were not training, and money. The clock starts with the process. It is
// counted over restarts: a resumed run goes on from the last line of metrics.jsonl, even if that is later than the
// checkpoint. (Time after the last line, such as the last checkpoint's, is lost from the bill.) Costs of earlier starts
// do not change if the run goes on with more devices or at another price. Device-hours without a known price are counted
// separately.
//
// The seconds of the steps in metrics.jsonl and those lost, without the ones for data, which are part of the steps, add up
// to the hours. The rest is the host's own work between two steps, such as writing metrics.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "gpt/base/clock.h"

// Where the seconds of one or several steps went. The parts add up to the step's time on the device.
struct StepTime {
  double compute = 0;                     // all that the others are not, gaps between kernels included
  std::map<std::string, double> exposed;  // the device only waited for the communication of a group of ranks
  double bubble = 0;                      // it waited for other stages of the pipeline
  double data = 0;                        // it had no samples

  double sum() const;
  void add(const StepTime& other);
};

// The parts of a step of `seconds`, of which it waited `data` for samples. The rest is divided as in `like`, which has
// no such wait.
StepTime divided(double seconds, double data, const StepTime& like);

class Bill {
 public:
  // price: of one device for an hour; 0: not known
  Bill(double price, int devices, Clock::time_point start = Clock::now()) : price_(price), devices_(devices), start_(start) {}

  // Seconds in which training waited, or computed steps that were undone.
  struct Lost {
    double setup = 0;        // from each start to its first step
    double checkpoints = 0, samples = 0;
    double evaluation = 0;   // validation, and --check-sync
    double data = 0;         // of steps: they waited for samples
    double left_out = 0;     // steps whose update was left out
    double rollbacks = 0;    // steps that were undone, and loading the checkpoint
    double restarts = 0;     // steps that were trained again after a restart
  } lost;
  StepTime steps;           // sums over steps in metrics.jsonl whose update was applied, earlier starts included
  size_t failed_hooks = 0;  // hooks that failed in this start

  // Reads the costs of earlier starts from their metrics. Steps up to `step` are kept; the others are trained again.
  void restore(const std::filesystem::path& metrics, size_t step);

  // To be called when the first step of this start begins.
  void end_setup();

  // Adds a rollback: the time that these metrics list for steps after `step`, and `seconds` for steps that they do not
  // list and for loading the checkpoint. The steps up to `step` are those that count.
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
  void print_shares(double seconds) const;

  double price_;
  int devices_;
  Spent before_;  // costs of earlier starts
  size_t restarts_ = 0;
  Clock::time_point start_;
};
