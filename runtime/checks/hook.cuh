// --check-ranks and --check-mesh before training, --check-sync in it.
#pragma once

#include "gpt/training_run.cuh"
#include "runtime/checks/mesh_check.cuh"
#include "runtime/checks/rank_check.cuh"
#include "runtime/checks/sync_check.cuh"

class ChecksHook : public StepHook {
 public:
  using StepHook::StepHook;

  void before_model() override {
    Job& job = run_.job;
    const CheckOptions& checks = job.options.of<CheckOptions>();
    if (checks.ranks) speed_of_rank(job);
    if (!checks.mesh) return;
    if (job.options.lora.is_on()) usage_error("--check-mesh beside adapters is not there yet: leave it out");
    check_mesh(job, run_.data);
  }

  bool looks_at_weights() const override { return run_.every(run_.o.check_sync); }
  void end_step() override {
    if (!looks_at_weights()) return;
    const AddTime timer(run_.bill.lost.evaluation);
    for (Parameters* parameters : {&run_.model->trained_store(), run_.model->frozen()})
      if (parameters) check_sync(run_.job.ranks, run_.job.mesh, *parameters, run_.steps_done(), run_.job.stream);
  }
};

inline std::unique_ptr<StepHook> checks_hook(TrainingRun& run) { return std::make_unique<ChecksHook>(run); }
