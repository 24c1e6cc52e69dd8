// The state that training changes, and how it is saved and loaded: weights and moments, the guard, the progress.
#pragma once

#include "kernels/gemm_choices.cuh"
#include "runtime/checkpoint.h"
#include "runtime/guard.h"
#include "runtime/manifest.h"
#include "runtime/shared_checkpoint.h"
#include "runtime/trainer_state.h"
#include "training/setup.cuh"

struct TrainingState {
  Job& job;
  const Datasets& data;
  Model& model;
  CheckpointCopies& copies;
  Guard guard;
  Progress progress;
};

inline CopyIn copy_in(Model& model) {
  return [&](const CheckpointSlice& slice, State state, const std::vector<float>& values) {
    model.store().copy_in(block_of(model.tensors(), slice), state, values);
  };
}

// Loads those weights that this rank keeps.
inline void load_model_weights(Model& model, const std::filesystem::path& folder) {
  load_weights(folder, model.tensors().shape(), stored_tensors(model.tensors()),
               checkpoint_slices(read_blocks(model.store().own_slices())), copy_in(model));
}

// Loads the weights of --init, from a checkpoint of this program or from any other folder.
inline void load_initial_weights(Job& job, Model& model, const std::filesystem::path& folder) {
  const std::string damage = has_manifest(folder) ? damage_anywhere(folder, job.ranks) : "";
  if (!damage.empty()) fail("--init ", damage, ": name another folder (without manifest_* files this is not checked)");
  load_model_weights(model, folder);
}

inline void start_afresh(TrainingState& state) {
  const std::string& init = state.job.options.init;
  state.model.store().clear();
  if (init.empty()) state.model.store().initialize();
  else load_initial_weights(state.job, state.model, init);
}

inline void load_checkpoint(TrainingState& state, const Checkpoint& checkpoint) {
  Options& o = state.job.options;
  Model& model = state.model;
  const std::filesystem::path folder = state.copies.folder_of(checkpoint.folder);
  const TrainerState trainer =
      load_trainer_state(folder, checkpoint.step, loss_scale_of(o), state.guard, o, state.data.identity);
  if (o.train_minutes > 0) o.schedule.steps = trainer.steps;
  load_model_weights(model, folder);
  load_optimizer(folder, stored_tensors(model.tensors()), checkpoint_slices(read_blocks(model.store().own_slices())),
                 copy_in(model));
  state.progress = {.step = checkpoint.step, .samples_left_out = trainer.samples - checkpoint.step * size_t(o.global_batch)};
  model.store().set_progress(checkpoint.step - state.guard.left_out(), trainer.loss_scale);
  for (const auto& [product, choice] : trainer.algorithms) gemm_choices().known.try_emplace(product, choice);
}

// What this rank writes of the model. chunk_bytes: of the ranks' group.
inline std::vector<CheckpointSlice> written_slices(Model& model, size_t chunk_bytes) {
  return checkpoint_slices(written_blocks(model.store().shards(), chunk_bytes / sizeof(float)));
}

// The content of a checkpoint of the present state. Its copies run on the model's stream.
inline CheckpointContent content_of(TrainingState& state, const std::filesystem::path& tokenizer_folder) {
  const Options& o = state.job.options;
  Model& model = state.model;
  const TrainerState trainer = {state.progress.first_sample(size_t(o.global_batch)), o.schedule.steps,
                                model.gradient_summary().scale, gemm_choices().known};
  return {.shape = model.tensors().shape(),
          .tensors = stored_tensors(model.tensors()),
          .slices = written_slices(model, state.job.ranks.chunk_bytes),
          .copy_out =
              [&model](const CheckpointSlice& slice, State state, float* to) {
                model.store().copy_out(block_of(model.tensors(), slice), state, to);
              },
          .trainer = trainer_text(trainer, state.guard, o, state.data.identity),
          .tokenizer_folder = tokenizer_folder,
          .wait = [&model] { CUDA_CHECK(cudaStreamSynchronize(model.stream())); }};
}
