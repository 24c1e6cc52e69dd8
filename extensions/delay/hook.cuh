// --delay: after the last step its gradients are applied, too. There is no step to go back to.
#pragma once

#include "gpt/training_run.cuh"

class DelayHook : public StepHook {
 public:
  using StepHook::StepHook;

  void end_step() override {
    if (run_.steps_done() < run_.o.schedule.steps) return;
    Guard& guard = run_.state.guard;
    Model& model = *run_.model;
    const StepLimits limits = guard.limits(false);
    model.begin_sums();
    model.update(adamw_at(run_.o, run_.rate_of_update()), float(run_.o.grad_clip), guard.enforced(limits));
    const GradientSummary gradients = model.gradient_summary();
    const Guard::Judgement judgement = guard.judge(gradients.loss, gradients.norm, gradients.applied(), limits);
    const StepResult result = {run_.steps_done(), gradients.loss, gradients.norm, run_.rate_of_update(), 0, gradients.applied(), 0};
    if (!judgement.reason.empty()) run_.telemetry->went_wrong(result, judgement.reason, false);
  }
};

inline std::unique_ptr<StepHook> delay_hook(TrainingRun& run) { return run.o.delay ? std::make_unique<DelayHook>(run) : nullptr; }
