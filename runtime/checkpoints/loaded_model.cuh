// A model that is loaded to be used, not trained.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "runtime/checkpoints/state.cuh"

// The checkpoint that --generate loads, the newest whole one; none: it loads --init. A checkpoint of --resume beats
// --init, as in training, so the command line of a run that began with --init, with --generate added, shows what the
// run has learned. What is said goes to stderr, as stdout has the texts. Collective.
inline std::optional<Checkpoint> generating_checkpoint(const Job& job) {
  const Options& o = job.options;
  if (!o.init.empty() && !o.resume) return {};
  const bool by_out = o.resume_from.empty();
  const RunStart start = {.resume = true, .resume_from = by_out ? o.out : o.resume_from, .option = by_out ? "--out" : "--resume",
                          .notes = job.is_first() ? stderr : stdout};
  return choose_shared_checkpoint("", start, job.ranks);
}

struct LoadedModel {
  std::optional<Checkpoint> checkpoint;  // none: it is that of --init
  std::filesystem::path base;            // the folder of the whole model, beside which adapters may be
  std::unique_ptr<Model> model;
};

// samples: texts that it will generate at the same time. Collective.
inline LoadedModel load_model(Job& job, int samples) {
  Options& o = job.options;
  LoadedModel loaded = {generating_checkpoint(job), {}, {}};
  const auto& [checkpoint, base, model] = loaded;
  const std::filesystem::path folder = checkpoint ? checkpoint->folder : std::filesystem::path(o.init);
  loaded.base = folder_of_model(o, folder, checkpoint.has_value());
  o.shape = loaded_shape(o, base);
  o.micro_batch = samples;
  refuse(shape_problem(o));
  decide_attention(o, {});
  loaded.model = build_model(o, job.mesh, job.stream, false, samples);
  if (checkpoint) load_weights(folder, model->store());
  if (!checkpoint || model->frozen()) load_initial_weights(job, *model, o.init);
  return loaded;
}
