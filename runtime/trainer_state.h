// trainer.json of a checkpoint: what a resumed run needs beside weights and moments.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>

#include "kernels/update.h"
#include "runtime/data.h"
#include "runtime/guard.h"
#include "runtime/options.h"

struct TrainerState {
  size_t samples = 0;  // taken so far, or left out
  size_t steps = 0;    // of the whole run; with --train-minutes the run that goes on must keep it
  LossScale loss_scale;
  std::map<std::string, std::string> algorithms;  // of matrix products, by what they are called
};

// What a run reads; no validation: 0 tokens.
struct RunData {
  DataIdentity train, val;
};

// For CheckpointContent::trainer, with the guard's state, and the options and data that decide what a run computes.
std::string trainer_text(const TrainerState& state, const Guard& guard, const Options& options, const RunData& data);

// Of a checkpoint that nobody vouches for, which should be of step `step`; fails if it is not, if its options or its
// training data are others, and says so if its validation data are. Restores the guard, too. loss_scale: what holds where
// the checkpoint stores none.
TrainerState load_trainer_state(const std::filesystem::path& folder, size_t step, const LossScale& loss_scale, Guard& guard,
                                const Options& options, const RunData& data);
