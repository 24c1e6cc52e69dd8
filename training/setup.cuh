// From options to a model: which checkpoint, which shape, which memory.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "model.cuh"
#include "parallel/agreement.h"
#include "runtime/manifest.h"
#include "runtime/run_folder.h"
#include "training/batches.cuh"
#include "training/job.cuh"

// What is wrong with a checkpoint, if anything. Ranks share the work.
inline std::string damage_anywhere(Job& job, const std::filesystem::path& folder) {
  const Control& control = job.control;
  for (const std::string& damage : job.control.all_gather(damage_of(folder, size_t(control.rank()), size_t(control.size()))))
    if (!damage.empty()) return damage;
  return "";
}

// The newest checkpoint that is whole. Those that are passed over are set aside when the run folder is claimed.
inline std::optional<Checkpoint> choose_valid_checkpoint(Job& job, const RunStart& start) {
  std::optional<Checkpoint> found = choose_checkpoint(job.options.out, start);
  require_agreement(job.control, "checkpoint", found ? found->folder.string() : "none",
                    "all ranks must see the same files: use a file system that they share, or a copy on each host");
  if (found) found = whole_checkpoint(*found, start, [&](const auto& folder) { return damage_anywhere(job, folder); });
  return found;
}

// The folder of --generate's weights.
inline std::filesystem::path weights_folder(const Options& o) {
  if (!o.init.empty()) return o.init;
  const std::filesystem::path from = o.resume_from.empty() ? o.out : o.resume_from;
  const std::optional<Checkpoint> found = find_checkpoint(from);
  if (!found) fail("--generate: ", from, " holds no checkpoint; name one with --resume DIR or --init DIR");
  return found->folder;
}

// Of the weights in the folder, which may ask for another sequence length.
inline ModelShape loaded_shape(Options& o, const std::filesystem::path& folder) {
  const ModelShape shape = load_shape(folder);
  check_loaded_shape(o, shape, folder);
  if (o.seq_len == 0) o.seq_len = shape.positions;
  return shape;
}

inline ModelShape decide_shape(Options& o, const std::optional<Checkpoint>& checkpoint, const Datasets& data) {
  const std::filesystem::path folder = checkpoint ? checkpoint->folder : std::filesystem::path(o.init);
  const ModelShape shape = folder.empty() ? shape_of(o, data.train->default_vocabulary()) : loaded_shape(o, folder);
  check_shape(shape, o.seq_len);
  check_micro_batch(o);
  check_enough(o, *data.train, "--train", size_t(o.global_batch));
  if (data.validation) check_enough(o, *data.validation, "--val", o.val_batches * size_t(o.global_batch));
  return shape;
}

inline Recompute recompute_of(const std::string& name) {
  return name == "block" ? Recompute::block : name == "gelu" ? Recompute::gelu : Recompute::none;
}

// Only fp16 needs one.
inline LossScale loss_scale_of(const Options& o) {
  if (o.dtype != "fp16") return {};
  return {.value = float(o.loss_scale), .window = o.loss_scale_window};
}

inline std::unique_ptr<Model> build_model(Job& job, const ModelShape& shape, bool training) {
  const Options& o = job.options;
  const int rows = o.micro_batch * o.seq_len, chunks = o.logit_chunks ? o.logit_chunks : ceil_div(rows, 16384);
  std::unique_ptr<Model> model = make_model(
      o.dtype,
      {.shape = shape,
       .micro_batch = o.micro_batch,
       .seq_len = o.seq_len,
       .recompute = recompute_of(o.recompute),
       .logit_chunks = std::min(chunks, rows),
       .library_attention = o.attention == "cudnn" || (o.attention == "auto" && training),
       .store = {.stage = o.zero,
                 .training = training,
                 .stochastic_rounding = o.stochastic_rounding,
                 .loss_scale = loss_scale_of(o),
                 .reduce_narrow = o.reduce_dtype == "bf16",
                 .seed = o.seed}},
      job.mesh.dp(), job.stream);
  if (o.attention == "cudnn" && !model->attention_problem().empty())
    usage_error("--attention cudnn: ", model->attention_problem(), "; leave the option out");
  return model;
}
