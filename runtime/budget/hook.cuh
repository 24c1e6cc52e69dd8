// --train-minutes: finds how many steps fit, from a few steps that are timed and then undone. --max-hours: ends the run at
// its limit of time.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "gpt/base/process.h"
#include "gpt/schedule.h"
#include "gpt/training_run.cuh"
#include "runtime/budget/options.h"

class BudgetHook : public StepHook {
 public:
  using StepHook::StepHook;

  void prepare() override {
    const Options& o = run_.o;
    if (o.train_minutes > 0 && o.schedule.steps == Options::most_steps) choose_steps();
  }

  std::string stops() override {  // by rank 0's clock: it has to know the reason, and ranks do not start at the same time
    const double hours = run_.o.of<TimeLimit>().hours;
    return run_.job.is_first() && hours > 0 && seconds_since(process_start) >= 3600 * hours ? "--max-hours" : "";
  }

 private:
  // Sets the schedule's number of steps. Rank 0's clock decides for all ranks.
  void choose_steps() {
    Options& o = run_.o;
    const Unobserved unobserved;  // traces must not show steps that are undone
    const Clock::time_point begin = Clock::now();
    const double step = seconds_of_a_step();
    double each = step;
    for (const auto& hook : run_.hooks) each += hook->seconds_beside(step);
    const double validation = seconds_of_a_validation();
    run_.model->trained_store().clear();
    start_afresh(run_.state);
    const double left = 60 * o.train_minutes - seconds_since(begin);
    if (left < each)
      std::printf("--train-minutes %g: the time was over when %d steps had been timed; one step follows\n", o.train_minutes,
                  unmeasured + measured);
    const size_t steps = steps_within(left, each, validation, o.val_every);
    o.schedule.steps = std::stoull(run_.job.ranks.all_gather(std::to_string(steps))[0]);
    if (const std::string problem = attempt([&] { validate(o.schedule); }); !problem.empty())
      usage_error("--train-minutes ", o.train_minutes, " is ", o.schedule.steps, " steps here: ", problem);
  }

  double seconds_of_a_step() {
    const Options& o = run_.o;
    const Actions actions = run_.job.actions();
    std::vector<double> seconds;
    for (int step = 0; step < unmeasured + measured; ++step) {  // with a learning rate of 0
      const Clock::time_point start = Clock::now();
      run_.model->begin_sums();
      run_step(*run_.model, actions, run_.batches.of_step({size_t(step)}), adamw_at(o, 0), float(o.grad_clip));
      run_.model->sums();
      if (step >= unmeasured) seconds.push_back(seconds_since(start));
    }
    return median(seconds);
  }

  double seconds_of_a_validation() {
    const Options& o = run_.o;
    double seconds = 0;
    for (int time = 0; !o.val.empty() && time < 2; ++time) {
      const Clock::time_point start = Clock::now();
      validation_losses(*run_.model, run_.batches, o, 1);
      seconds = double(o.val_batches) * seconds_since(start);
    }
    return seconds;
  }

  static constexpr int unmeasured = 2, measured = 5;  // the first steps allocate memory and load kernels

};

inline std::unique_ptr<StepHook> budget_hook(TrainingRun& run) { return std::make_unique<BudgetHook>(run); }
