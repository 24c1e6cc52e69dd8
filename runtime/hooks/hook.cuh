// --stop-when, and what the other commands are told of a run.
#pragma once

#include "gpt/training_run.cuh"

class CommandsHook : public StepHook {
 public:
  using StepHook::StepHook;

  std::string stops() override { return run_.job.hooks.asks_to_stop() ? "--stop-when" : ""; }
  void after_update() override { run_.bill.failed_hooks = run_.job.hooks.failures(); }
  std::optional<int> end() override {
    if (run_.is_stopping && run_.stops() == "--max-hours") run_.job.hooks.stop_reason = "time";
    return {};
  }
};

inline std::unique_ptr<StepHook> hooks_hook(TrainingRun& run) { return std::make_unique<CommandsHook>(run); }
