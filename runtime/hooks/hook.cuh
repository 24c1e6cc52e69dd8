// The commands of a run: where they are started and ended, --stop-when, and how often they have failed.
#pragma once

#include "gpt/training_run.cuh"
#include "runtime/hooks/hooks.h"

inline std::unique_ptr<ProcessHook> hooks_process_hook(int argc, char** argv) {
  const RoomOptions options = split_private({argv + 1, argv + argc}).first;
  return options.of<HookOptions>().are_given() ? std::make_unique<Hooks>(options.of<HookOptions>()) : nullptr;
}

class CommandsHook : public StepHook {
 public:
  CommandsHook(TrainingRun& run, Hooks& hooks) : StepHook(run), hooks_(hooks) {}

  std::string stops() override { return hooks_.asks_to_stop() ? "--stop-when" : ""; }
  void after_update() override { run_.bill.failed_hooks = hooks_.failures(); }
  std::optional<int> end() override {
    if (run_.is_stopping && run_.stops() == "--max-hours") hooks_.stop_reason = "time";
    return {};
  }

 private:
  Hooks& hooks_;
};

inline std::unique_ptr<StepHook> hooks_hook(TrainingRun& run) {
  for (const auto& hook : run.job.hooks)
    if (auto* hooks = dynamic_cast<Hooks*>(hook.get())) return std::make_unique<CommandsHook>(run, *hooks);
  return nullptr;
}
