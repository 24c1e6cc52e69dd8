// --local-steps: outer steps behind the updates of a run.
#pragma once

#include "extensions/islands/islands.h"
#include "extensions/islands/outer_steps.cuh"
#include "gpt/training_run.cuh"

class IslandsHook : public StepHook {
 public:
  using StepHook::StepHook;

  void prepare() override { outer_steps_.emplace(run_.o.outer, *run_.model); }
  std::string description() override { return concat("outer     ", text_of(run_.o.outer), '\n'); }
  size_t steps_between() const override { return size_t(run_.o.outer.local_steps); }
  void after_update() override { outer_steps_->after_update(run_.steps_done(), run_.all_meet(), run_.looks_at_weights()); }
  void end_step() override {
    if (run_.done()) outer_steps_->finish();  // all have been told to stop
  }

  double seconds_beside(double step) override {
    double seconds = 0;
    for (int time = 0; time < 2; ++time) {  // the first one allocates memory and loads kernels
      const Clock::time_point start = Clock::now();
      run_.model->trained_store().outer_step(false);
      CUDA_CHECK(cudaStreamSynchronize(run_.model->stream()));
      seconds = seconds_since(start);
    }
    const OuterOptions& o = run_.o.outer;
    return std::max(0.0, seconds - o.delay * step) / o.local_steps;
  }

 private:
  std::optional<OuterSteps> outer_steps_;
};

inline std::unique_ptr<StepHook> islands_hook(TrainingRun& run) {
  return run.o.outer.is_on() ? std::make_unique<IslandsHook>(run) : nullptr;
}
