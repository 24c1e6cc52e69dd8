// Watches loss and gradient norm, and decides how to react to steps that went wrong:
//
//   not finite   the device has left the update out (kernels/norm.cuh); `most_in_a_row` of them in a row end the run
//   a spike      loss or norm is more than `z` standard deviations above its mean over the last `window` steps whose
//                updates were applied. log: print it, and apply the update. skip: leave the update out. rollback: load
//                the last checkpoint, and go on with the samples after the spike, at most `most_rollbacks` times in a
//                run (as for PaLM: Chowdhery et al., arXiv:2204.02311, section 5.1)
//
// The window holds all steps whose update was applied, spikes that were only logged included: if the data changes
// permanently, the first few steps are spikes, and then the window has the new level. It does not hold steps that were
// left out: if the new level stays then, `most_in_a_row` ends the run.
//
// All ranks see the same losses and norms, so they decide the same. Checkpoints hold the guard's state.
#pragma once

#include <cstddef>
#include <deque>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "kernels/update.h"
#include "runtime/guard/options.h"

class JsonFields;

class Guard {
 public:
  enum class Response { none, left_out, roll_back };
  struct Judgement {
    Response action = Response::none;
    std::string reason;  // empty: the step was good
  };

  explicit Guard(const GuardOptions& options) : options_(options) {}

  size_t left_out() const { return left_out_; }  // number of updates that were left out in the whole run
  size_t rollbacks() const { return rollbacks_; }

  // The limits above which the next step is a spike. The step before it may still be under way; the limits never
  // include it, so that they are the same in either case.
  StepLimits limits(bool one_under_way) const { return one_under_way ? spike_limits() : previous_; }

  // The limits above which the device itself leaves an update out. With --on-spike log it does so only if a number is not
  // finite.
  StepLimits enforced(const StepLimits& limits) const { return options_.on_spike == "log" ? StepLimits{} : limits; }

  // Judges a step; to be called after every step, with its limits. Fails if the run has to end.
  Judgement judge(double loss, double norm, bool applied, const StepLimits& limit);

  // Counts an update that is left out without being judged.
  void count_left_out() { ++left_out_; }

  // Counts a rollback. To be called before the checkpoint is loaded, because loading it must not reset the count.
  void count_rollback();

  nlohmann::json state() const;
  std::string state_text() const;
  // state: from a trainer.json, which is not trusted. steps: those whose gradients were applied or left out until then
  void restore(JsonFields state, size_t steps);

 private:
  StepLimits spike_limits() const;

  GuardOptions options_;
  std::deque<double> losses_, norms_;  // the window: those of the last steps whose update was applied
  StepLimits previous_;  // the limits without the last step
  size_t left_out_ = 0, in_a_row_ = 0, rollbacks_ = 0;
};
