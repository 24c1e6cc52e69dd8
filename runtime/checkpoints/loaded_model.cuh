// A model that is loaded to be used, not trained.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "runtime/checkpoints/state.cuh"

// The checkpoint that --generate loads, the newest whole one; none: it loads --init. A checkpoint of --resume beats
// --init, as in training, so the command line of a run that began with --init, with --generate added, shows the trained
// model. Messages go to stderr, because the texts go to stdout. Collective.
inline std::optional<Checkpoint> generating_checkpoint(const Job& job) {
  const Options& o = job.options;
  if (!o.init.empty() && !o.resume) return {};
  const bool by_out = o.resume_from.empty();
  const StartOptions start = {.resume = true, .resume_from = by_out ? o.out : o.resume_from, .option = by_out ? "--out" : "--resume",
                          .notes = job.is_first() ? stderr : stdout};
  return choose_shared_checkpoint("", start, {job.ranks});
}

// The folder of the whole model, to which the checkpoint's adapters may belong; --init if there is no checkpoint.
inline std::filesystem::path base_of(Job& job, const std::optional<Checkpoint>& checkpoint) {
  return folder_of_model(job.options, checkpoint ? checkpoint->folder : std::filesystem::path(job.options.init), checkpoint.has_value());
}

// base: of the checkpoint; samples: texts that the model will generate at the same time. Collective.
inline std::unique_ptr<Model> load_model(Job& job, const std::optional<Checkpoint>& checkpoint, const std::filesystem::path& base,
                                         int samples) {
  Options& o = job.options;
  o.shape = loaded_shape(o, base);
  o.micro_batch = samples;
  refuse(shape_problem(o));
  std::unique_ptr<Model> model = build_model(o, job.mesh, job.stream, false, samples);
  if (checkpoint) load_weights(checkpoint->folder, model->trained_store());
  if (!checkpoint || model->frozen()) load_initial_weights(job, *model, o.init);
  return model;
}
