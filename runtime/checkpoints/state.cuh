// The state that training changes, and how it is saved and loaded: weights and moments, the guard, the progress.
#pragma once

#include "gpt/checkpoint.h"
#include "gpt/setup.cuh"
#include "kernels/gemm/gemm_choices.cuh"
#include "runtime/checkpoints/checkpoint_writer.h"
#include "runtime/checkpoints/errors.h"
#include "runtime/checkpoints/manifest.h"
#include "runtime/checkpoints/options.h"
#include "runtime/checkpoints/shared_checkpoint.h"
#include "runtime/checkpoints/trainer_record.h"
#include "runtime/guard/guard.h"

struct TrainingState {
  Job& job;
  const Datasets& data;
  Model& model;
  CheckpointCopies& copies;
  Guard guard;
  Progress progress;
  BestValidation best = {};
  std::vector<int> stored_shares = {};  // shares in the checkpoint that was loaded last

  const CheckpointFiles& files() const { return std::as_const(job.options).of<CheckpointFiles>(); }
  bool is_out_of_patience() const { return files().patience > 0 && best.since >= files().patience; }
  // Has the last step the lowest val_loss so far, and is that to be saved?
  bool is_best() const { return files().keep_best && best.step == progress.step; }
  // Does the run folder lack the checkpoint of the best validation, because only a newer one was copied there?
  bool misses_best() const {
    const Options& o = job.options;
    return files().keep_best && !o.out.empty() && best.step > 0 &&
           !std::filesystem::exists(o.out / std::filesystem::path(checkpoint_name(best.step)));
  }
};

// The reason why a run has no more steps to do.
inline std::string how_finished(const TrainingState& state) {
  const auto& [loss, step, since] = state.best;
  const Options& o = state.job.options;
  if (!state.is_out_of_patience())
    return formatted("the checkpoint has %zu of %zu steps; a larger --steps goes on", state.progress.step, o.schedule.steps);
  return formatted("the last %zu validations were not below the best, val_loss %.4f after step %zu%s; a larger --patience goes on",
                   since, loss, step, state.misses_best() ? (", which is not in " + o.out).c_str() : "");
}

// Loads the weights of --init, from a checkpoint of this program or from any other folder.
inline void load_initial_weights(Job& job, Model& model, const std::filesystem::path& folder) {
  const std::string damage = manifest_files(folder).empty() ? "" : damage_anywhere(folder, {job.ranks});
  if (!damage.empty()) fail("--init ", damage, ": name another folder (without manifest_* files this is not checked)");
  load_weights(folder, model.frozen() ? *model.frozen() : model.trained_store());
}

inline void start_afresh(TrainingState& state) {
  const std::string& init = state.job.options.init;
  if (init.empty() || state.model.frozen()) state.model.trained_store().initialize();
  if (!init.empty()) load_initial_weights(state.job, state.model, init);
}

// Frozen weights are loaded once, when the run starts: no step changes them. applies_waiting: gradients that wait in the
// checkpoint (--delay) will be applied; else they count as left out
inline void load_checkpoint(TrainingState& state, const Checkpoint& checkpoint, bool applies_waiting = true) {
  Options& o = state.job.options;
  Model& model = state.model;
  const std::filesystem::path folder = state.copies.folder_of(checkpoint.folder);
  const int island = state.job.mesh.place().island;
  const TrainerRecord trainer =
      load_trainer_record(folder, checkpoint.step, loss_scale_of(o), state.guard, o, state.data.identity, island);
  if (trainer.steps > 0 && !o.steps_given) o.schedule.steps = trainer.steps;
  load_weights(folder, model.trained_store());
  load_optimizer(folder, model.trained_store(), {.island = island % trainer.islands(), .waits = trainer.waiting.has_value()});
  if (o.outer.is_on()) load_outer_momentum(folder, model.trained_store());
  if (model.trained_store().has_errors()) load_errors(folder, model.trained_store());
  state.progress = {.step = checkpoint.step, .samples_left_out = trainer.samples - checkpoint.step * size_t(o.global_batch)};
  state.best = trainer.best;
  state.stored_shares = trainer.shares;
  const size_t updates = checkpoint.step - state.guard.left_out() - trainer.waiting.has_value();  // AdamW's t
  if (trainer.waiting && !applies_waiting) state.guard.count_left_out();
  model.trained_store().set_progress(updates, trainer.loss_scale, applies_waiting ? trainer.waiting : std::nullopt);
  // (--check-mesh may have chosen otherwise.)
  for (const auto& [product, choice] : trainer.algorithms) gemm_choices().known[product] = choice;
}

// Loads the checkpoint, or, if there is none, begins with the weights of --init, or random ones.
inline void start_from(TrainingState& state, const std::optional<Checkpoint>& checkpoint) {
  if (checkpoint && state.model.frozen()) load_initial_weights(state.job, state.model, state.job.options.init);
  if (checkpoint) load_checkpoint(state, *checkpoint);
  else {
    refuse(attempt([&] { validate(state.job.options.schedule); }));
    start_afresh(state);
  }
}

// The blocks that this rank writes. A gathered one has at most chunk_bytes (RankGroup), so that it can be sent, too.
inline std::vector<CheckpointBlock> written_blocks(Model& model, size_t chunk_bytes) {
  const Parameters& store = model.trained_store();
  const size_t most = chunk_bytes / sizeof(float);
  std::vector<CheckpointBlock> blocks = written_blocks(store.shards(), most);
  if (store.has_errors()) std::ranges::copy(written_errors(store.shards(), most), std::back_inserter(blocks));
  std::ranges::copy(written_factors(store.factors(), store.shards()), std::back_inserter(blocks));
  return blocks;
}

// The states that this rank may have to save.
inline SavedStates saved_states(const Options& o, const Mesh& mesh) {
  return {mesh.place().island, mesh.shape().islands, o.outer.is_on(), o.delay > 0};
}

// The guards of all islands but the first, as texts. Collective.
inline std::vector<std::string> other_guards(const TrainingState& state) {
  const MeshShape& mesh = state.job.mesh.shape();
  std::vector<std::string> others;
  if (mesh.islands == 1) return others;
  const std::vector<std::string> all = state.job.ranks.all_gather(state.guard.state_text(), Ranks::for_slow_disks);
  for (int rank = mesh.of_an_island(); rank < mesh.ranks(); rank += mesh.of_an_island()) others.push_back(all[size_t(rank)]);
  return others;
}

// The content of a checkpoint of the present state. Collective. CheckpointWriter copies it on the model's stream, behind the
// update.
inline CheckpointContent content_of(TrainingState& state, const std::filesystem::path& tokenizer_folder) {
  const Options& o = state.job.options;
  Model& model = state.model;
  const TrainerRecord trainer = {state.progress.first_sample(size_t(o.global_batch)), o.schedule.steps,
                                 model.gradient_summary().scale, gemm_choices().known, state.best, {},
                                 model.trained_store().settle_waiting(), other_guards(state)};
  SavedStates states = saved_states(o, state.job.mesh);
  states.waits = trainer.waiting.has_value();
  std::map<std::string, std::string> texts;
  for (const Room* room : rooms())
    if (room->add_files) room->add_files(texts, o);
  return {model.trained_store(), written_blocks(model, RankGroup::chunk_bytes_for(state.job.ranks.size())),
          trainer_text(trainer, state.guard, o, state.data.identity), texts, tokenizer_folder, states};
}
