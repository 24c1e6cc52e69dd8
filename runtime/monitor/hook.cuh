// The monitor of a run, which gets the time of each step.
#pragma once

#include "gpt/training_run.cuh"
#include "runtime/monitor/monitor.h"
#include "runtime/monitor/options.h"

class MonitorHook : public StepHook {
 public:
  using StepHook::StepHook;

  void begin() override {
    const Job& job = run_.job;
    const Options& o = run_.o;
    char bus[32] = "";
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, job.mesh.device()));
    monitor_.emplace(dynamic_cast<Control&>(job.ranks), MonitorOptions{
        .every_s = o.of<MonitorInterval>().seconds,
        .path = o.out.empty() || !job.is_first() ? std::filesystem::path() : monitor_path(o.out),
        .pci_bus_id = bus,
        .ranks_of_a_stage = o.mesh.pp == 1 ? job.ranks.size() : o.mesh.of_an_island() / o.mesh.pp});
  }
  void finished(const FinishedStep& step) override {
    monitor_->add_step(step.reported.step, step.reported.seconds, run_.telemetry->waited());
  }
  std::optional<int> end() override {
    monitor_->finish();
    return {};
  }

 private:
  std::optional<Monitor> monitor_;
};

inline std::unique_ptr<StepHook> monitor_hook(TrainingRun& run) { return std::make_unique<MonitorHook>(run); }
