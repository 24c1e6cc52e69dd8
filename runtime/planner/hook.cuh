// A run's report of its plan: the memory that ranks have allocated (plan.json), the forecast of a step, and --calibrate.
#pragma once

#include "gpt/training_run.cuh"
#include "runtime/planner/calibration.cuh"
#include "runtime/planner/program.cuh"

class PlannerHook : public StepHook {
 public:
  using StepHook::StepHook;

  void before_model() override {
    if (!run_.o.of<PlanOptions>().calibrate.empty()) calibration_ = begun_calibration(run_.job);
    device_ = this_device(run_.job.device);
  }

  std::string description() override {
    Job& job = run_.job;
    const Options& o = job.options;
    const std::vector<MemoryCategory> batches = run_.batches.buffers().memory().categories();
    plan_ = gathered_plan(job.ranks, device_, rank_plan(*run_.model, job.mesh, job.ranks.rank(), batches, run_.checkpoints->snapshot_bytes()));
    plan_->steps = o.schedule.steps;
    const PlannedRun run = planned_run(o);
    const std::string problem = attempt([&] {
      if (const std::optional<Cluster> cluster = known_cluster(o, job.device, job.ranks.size()))
        plan_->time = planned_time(o, *cluster, run), forecast_ = plan_->time->forecast;
    });
    if (!o.of<PlanOptions>().cluster.empty()) refuse(problem);  // else links of these devices are not known, which ends no run
    return "memory    " + memory_text(*plan_) + '\n' + batch_hint_of(o, run);
  }

  void finished(const FinishedStep&) override {  // a run that fails in its first step leaves nothing behind
    if (run_.start.writes() && plan_) write_plan(run_.o.out, *plan_);
    plan_.reset();
  }

  std::string stops() override { return calibration_ && seconds_since(process_start) >= 90 ? "--calibrate" : ""; }

  std::optional<int> end() override {
    const auto is_interrupted = [&] {  // a signal may have reached one rank only
      return std::ranges::count(run_.job.ranks.all_gather(interrupting_signal != 0 ? "1" : ""), "1") > 0;
    };
    if (calibration_ && !is_interrupted())
      return complete_calibration(run_.job, *calibration_, run_.telemetry->measured(), forecast_), 0;
    if (forecast_) print_line(comparison_text(*forecast_, run_.telemetry->measured()));
    return {};
  }

 private:
  PlannedDevice device_;
  std::optional<nlohmann::ordered_json> calibration_;  // the file of --calibrate, which is not complete yet
  std::optional<Plan> plan_;
  std::optional<Forecast> forecast_;  // of a step; none: the devices are not known
};

inline std::unique_ptr<StepHook> planner_hook(TrainingRun& run) { return std::make_unique<PlannerHook>(run); }
