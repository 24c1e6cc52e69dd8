// Watches loss and gradient norm, and says what is to be done about steps that went wrong:
//
//   not finite   the update was left out on the device (kernels/norm.cuh); so many in a row end the run
//   a spike      loss or norm lies `z` standard deviations above its mean over the last `window` steps that were
//                trained on. log: say so, and train on it. skip: the update is left out. rollback: back to the last
//                checkpoint, and on with the samples that follow the spike's, at most `most_rollbacks` times in a run
//                (as for PaLM: Chowdhery et al., arXiv:2204.02311, section 5.1)
//
// What was trained on belongs to the window, a spike that was merely logged too: when the data changes for good, the
// first few steps are spikes, and then the window knows the new level. What was left out does not: there `most_in_a_row`
// ends the run if the level stays.
//
// All ranks see the same losses and norms, so they decide alike. The state goes into checkpoints.
#pragma once

#include <cmath>
#include <cstddef>
#include <deque>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "kernels/update.h"

struct GuardOptions {
  std::string on_spike = "log";  // or skip, rollback
  double z = 6;
  size_t window = 128, most_in_a_row = 100, most_rollbacks = 3;
};

// The last values of a quantity, finite ones only.
class SpikeWindow {
 public:
  explicit SpikeWindow(size_t size) : size_(size) {}

  // The value that lies z standard deviations above the mean; infinite until the window is full.
  double limit(double z) const;

  void add(double value);
  nlohmann::json state() const;
  void restore(const nlohmann::json& state);

 private:
  size_t size_;
  std::deque<double> values_;
};

class Guard {
 public:
  enum class Action { none, left_out, roll_back };
  struct Judgement {
    Action action = Action::none;
    std::string reason;  // empty: all is well
  };

  explicit Guard(const GuardOptions& options) : options_(options), losses_(options.window), norms_(options.window) {}

  size_t left_out() const { return left_out_; }  // updates in the whole run
  size_t rollbacks() const { return rollbacks_; }

  // What makes a spike of the next step. The one before it may still be under way, and never counts, so that it does
  // not matter whether it is.
  StepLimits limits(bool one_under_way) const { return one_under_way ? spike_limits() : previous_; }

  // Does the update that follows a spike have to be left out?
  bool prevents_updates() const { return options_.on_spike != "log"; }

  // To be called after every step, with its limits. Fails when the run can't help itself.
  Judgement judge(double loss, double norm, bool applied, const StepLimits& limit);

  // Before the state of the checkpoint is restored, as the count must outlive it.
  void count_rollback();

  nlohmann::json state() const;
  // From a trainer.json that nobody vouches for.
  void restore(const nlohmann::json& state);

 private:
  StepLimits spike_limits() const;

  GuardOptions options_;
  SpikeWindow losses_, norms_;
  StepLimits previous_;  // without the last step
  size_t left_out_ = 0, in_a_row_ = 0, rollbacks_ = 0;
};
