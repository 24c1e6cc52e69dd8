// Watches loss and gradient norm, and says what is to be done about steps that went wrong:
//
//   not finite   the update was left out on the device (kernels/norm.cuh); so many in a row end the run
//   a spike      loss or norm lies `z` standard deviations above its mean over the last `window` good steps.
//                log: say so. skip: the update is left out. rollback: back to the last checkpoint, and on with the
//                samples that follow the spike's, at most `most_rollbacks` times in a run (as for PaLM:
//                Chowdhery et al., arXiv:2204.02311, section 5.1)
//
// All ranks see the same losses and norms, so they decide alike. The state goes into checkpoints.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <sstream>
#include <string>

#include <nlohmann/json.hpp>

#include "runtime/error.h"

struct GuardOptions {
  std::string on_spike = "log";  // or skip, rollback
  double z = 6;
  size_t window = 128, most_in_a_row = 100, most_rollbacks = 3;
};

// The last values of a quantity, good ones only.
class SpikeWindow {
 public:
  explicit SpikeWindow(size_t size) : size_(size) {}

  // The value that lies z standard deviations above the mean; infinite until the window is full.
  double limit(double z) const {
    if (values_.size() < size_) return INFINITY;
    double sum = 0, squares = 0;
    for (double value : values_) sum += value;
    const double mean = sum / double(size_);
    for (double value : values_) squares += (value - mean) * (value - mean);
    return mean + z * std::sqrt(squares / double(size_));
  }

  void add(double value) {
    values_.push_back(value);
    if (values_.size() > size_) values_.pop_front();
  }

  nlohmann::json state() const { return values_; }
  void restore(const nlohmann::json& state) { values_ = state.get<std::deque<double>>(); }

 private:
  size_t size_;
  std::deque<double> values_;
};

struct SpikeLimits {
  float loss = INFINITY, norm = INFINITY;
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
  SpikeLimits limits(bool one_under_way) const { return one_under_way ? spike_limits() : previous_; }

  // Does the update that follows a spike have to be left out?
  bool prevents_updates() const { return options_.on_spike != "log"; }

  // To be called after every step, with its limits. Fails when the run can't help itself.
  Judgement judge(double loss, double norm, bool applied, const SpikeLimits& limit) {
    previous_ = spike_limits();
    const bool finite = std::isfinite(loss) && std::isfinite(norm);
    std::string reason;  // compared as the device does
    if (!finite) reason = text("loss ", loss, ", gradient norm ", norm, ": not finite");
    else if (float(loss) > limit.loss) reason = text("loss ", loss, " is a spike: above ", limit.loss);
    else if (float(norm) > limit.norm) reason = text("gradient norm ", norm, " is a spike: above ", limit.norm);
    in_a_row_ = applied ? 0 : in_a_row_ + 1;
    left_out_ += !applied;
    if (reason.empty()) {
      losses_.add(loss);
      norms_.add(norm);
      return {};
    }
    if (in_a_row_ >= options_.most_in_a_row)
      fail(reason, "; so were the ", in_a_row_ - 1, " steps before: lower --lr, check the data, or resume from an earlier "
           "checkpoint");
    if (finite && options_.on_spike == "rollback") return {Action::roll_back, reason};
    return {applied ? Action::none : Action::left_out, reason};
  }

  // Before the state of the checkpoint is restored, as the count must outlive it.
  void count_rollback() {
    if (++rollbacks_ > options_.most_rollbacks)
      fail("after ", options_.most_rollbacks, " rollbacks (--max-rollbacks) there is another spike: lower --lr, check the "
           "data, or go on with --on-spike skip");
  }

  nlohmann::json state() const {
    return {{"losses", losses_.state()}, {"norms", norms_.state()}, {"limits", {previous_.loss, previous_.norm}},
            {"left_out", left_out_}, {"in_a_row", in_a_row_}, {"rollbacks", rollbacks_}};
  }
  // From a trainer.json that nobody vouches for.
  void restore(const nlohmann::json& state) {
    const auto check = [](bool valid) {
      if (!valid) fail("trainer.json: its \"guard\" is not what this program writes: resume from another checkpoint");
    };
    for (const char* name : {"losses", "norms"}) {
      check(state.contains(name) && state[name].is_array());
      for (const auto& value : state[name]) check(value.is_number());
    }
    for (const char* name : {"left_out", "in_a_row", "rollbacks"})
      check(state.contains(name) && state[name].is_number_unsigned());
    check(state.contains("limits") && state["limits"].is_array() && state["limits"].size() == 2);
    const auto limit = [&](size_t i) {  // JSON has no infinity
      const nlohmann::json& value = state["limits"][i];
      check(value.is_null() || value.is_number());
      return value.is_null() ? INFINITY : value.get<float>();
    };
    previous_ = {limit(0), limit(1)};
    losses_.restore(state.at("losses"));
    norms_.restore(state.at("norms"));
    left_out_ = state.at("left_out");
    in_a_row_ = state.at("in_a_row");
    rollbacks_ = std::max(rollbacks_, state.at("rollbacks").get<size_t>());
  }

 private:
  SpikeLimits spike_limits() const { return {float(losses_.limit(options_.z)), float(norms_.limit(options_.z))}; }

  template <class... Parts>
  static std::string text(const Parts&... parts) {
    std::ostringstream stream;
    (stream << ... << parts);
    return stream.str();
  }

  GuardOptions options_;
  SpikeWindow losses_, norms_;
  SpikeLimits previous_;  // without the last step
  size_t left_out_ = 0, in_a_row_ = 0, rollbacks_ = 0;
};
