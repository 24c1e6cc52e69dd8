// How a room takes part in training. A folder of extensions/ or runtime/ with a file hook.cuh has a function in it, called
// NAME_hook, which takes the run (gpt/training_run.cuh) and returns the room's StepHook, or null if the options do not ask for
// it; dev/make/rooms.sh writes the list. The trainer (gpt/trainer.cuh) calls each function below at its moment, for all hooks
// in the order of their rooms' names, on all ranks. A room overrides those that it needs.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct FinishedStep;
class TrainingRun;

class StepHook {
 public:
  explicit StepHook(TrainingRun& run) : run_(run) {}
  virtual ~StepHook() = default;

  // ---- before the first step. An error before begin() has changed no run that is there.
  // The model's shape is known; the model has not been built.
  virtual void before_model() {}
  // Goes through the passes that the room will have beside the steps, with tokens of 0 (gpt/rehearsal.cuh).
  virtual void rehearse() {}
  // The weights and the state are there, and all passes have been rehearsed.
  virtual void prepare() {}
  // Lines for the terminal, in the description of the run; to be asked after prepare().
  virtual std::string description() { return ""; }
  // The run folder is this run's. The first step follows.
  virtual void begin() {}

  // ---- in each step
  // Why this rank asks all to stop after this step; empty: it does not.
  virtual std::string stops() { return ""; }
  // Does rank 0 ask for something that all ranks do together? They learn it from the step's result (FinishedStep::asked).
  virtual bool asks() { return false; }
  // The step's update has been given to the device.
  virtual void after_update() {}
  // The device has finished a step. The one after it may be under way.
  virtual void finished(const FinishedStep&) {}
  // The step has been given to the device, and the ones before it have been judged. Nothing has been validated or saved.
  virtual void end_step() {}
  // Validation and the checkpoint of this step, if it has any, are over.
  virtual void between_steps() {}

  // All steps are over, and their summary is printed. Returns the exit code if the room decides it.
  virtual std::optional<int> end() { return {}; }

  // ---- questions of the trainer
  // The number of steps after which all ranks meet.
  virtual size_t steps_between() const { return 1; }
  // Will the room look at the weights after this step, as far as it knows by now? The host then waits for the step's result.
  virtual bool looks_at_weights() const { return false; }
  // The seconds that the room adds to each step, on average, as measured now. step: seconds of a step without them.
  virtual double seconds_beside(double /* step */) { return 0; }

 protected:
  TrainingRun& run_;
};

// Those of this build whose rooms take part in this run.
std::vector<std::unique_ptr<StepHook>> step_hooks(TrainingRun& run);
