// trainer.json of a checkpoint: the data that a resumed run needs besides weights and moments.
#pragma once

#include <cmath>
#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "gpt/data.h"
#include "gpt/options.h"
#include "kernels/update.h"
#include "runtime/guard/guard.h"

// The lowest val_loss so far.
struct BestValidation {
  double loss = INFINITY;
  size_t step = 0, since = 0;  // after which it was measured, 0: there is none; validations since then

  // A loss that is not finite is never better.
  void add(double measured, size_t after) {
    if (std::isfinite(measured) && measured < loss) *this = {measured, after, 0};
    else ++since;
  }
};

struct TrainerRecord {
  size_t samples = 0;  // number of samples taken so far or left out
  size_t steps = 0;    // of the whole run; with --train-minutes a resumed run must keep this number
  LossScale loss_scale;
  std::map<std::string, std::string> algorithms;  // choices for matrix products, by name (kernels/gemm/gemm_choices.cuh)
  BestValidation best = {};
  std::vector<int> shares = {};  // of --shares; empty: none are stored
  std::optional<float> waiting = {};  // the loss of the batch whose gradients wait for the next step (--delay)
  std::vector<std::string> other_guards = {};  // guards of all islands except the first, as texts

  int islands() const { return 1 + int(other_guards.size()); }
};

// The text for CheckpointContent::trainer: state, guard, and the options and data that determine the results of a run.
std::string trainer_text(const TrainerRecord& state, const Guard& guard, const Options& options, const RunData& data);

// Reads the state from a checkpoint, which is not trusted, and restores the guard. Fails if the checkpoint is not of
// step `step`, or if options or training data differ from this run's; prints a message if validation data differ: the
// best val_loss so far, on the old first set, is then forgotten.
// loss_scale: used if the checkpoint stores none. island: this rank's number; it goes on with guard and moments of the
// checkpoint's island of this number (modulo the number of islands there).
TrainerRecord load_trainer_record(const std::filesystem::path& folder, size_t step, const LossScale& loss_scale, Guard& guard,
                                  const Options& options, const RunData& data, int island = 0);

// ---- the arithmetic: the options and the data that determine the results of a run. A checkpoint records them, and a
// resumed run must have the same: otherwise the loss curve would change in the middle without any message.

nlohmann::json arithmetic(const Options& o, const DataIdentity& train);

// Who computed attention in the run of this checkpoint, as --attention names it; "auto": it does not say
std::string stored_attention(const std::filesystem::path& folder);

// Fails if they differ. stored: from the checkpoint in `folder`; wanted: of this run.
void check_same_arithmetic(const nlohmann::json& stored, const nlohmann::json& wanted, const std::string& folder);
