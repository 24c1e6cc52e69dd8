// --shares auto: the times at which shares are measured and changed.
#pragma once

#include "extensions/shares/shares.cuh"
#include "gpt/training_run.cuh"
#include "runtime/checks/rank_check.cuh"

class SharesHook : public StepHook {
 public:
  using StepHook::StepHook;

  void before_model() override {
    run_.o.shares = shares_by_time(run_.job, 1 / speed_of_rank(run_.job).product);
  }

  // Shares of a job with as many data-parallel ranks, and as many micro-batches in a step, are a better start than the rank
  // check's.
  void prepare() override {
    const std::vector<int>& stored = run_.state.stored_shares;
    const StepOptions& o = run_.o;
    if (stored.size() == o.shares.size() && o.deal().all() == Deal(stored).all()) run_.share_out(stored);
  }

  // Sets the shares after ten steps by the time that each rank computed in them, without waits for others.
  void end_step() override {
    if (run_.telemetry->steps() != 10) return;
    const MeasuredStep step = run_.telemetry->measured();
    const StepOptions& o = run_.o;
    const std::vector<int> shares =
        shares_by_time(run_.job, (step.seconds - step.exposed) / o.deal().of_rank(o.batch_rank(run_.job.mesh.place())));
    if (shares == o.shares) return;
    std::printf("--shares auto: by the first steps, %s micro-batches from now on\n", text_of_counts(shares).c_str());
    run_.share_out(shares);
  }
};

inline std::unique_ptr<StepHook> shares_hook(TrainingRun& run) {
  return run.o.measures_shares ? std::make_unique<SharesHook>(run) : nullptr;
}
