// --merge: writes the adapters of a checkpoint and the model beside which they were trained as one model.
#pragma once

#include <cstdio>

#include "extensions/lora/merged_model.h"
#include "extensions/lora/options.h"
#include "gpt/command.h"
#include "runtime/checkpoints/loaded_model.cuh"

inline int merge(Job& job) {
  const std::optional<Checkpoint> checkpoint = generating_checkpoint(job);
  if (!checkpoint) usage_error("--merge: name the run whose adapters it takes with --resume");
  const std::string from = checkpoint->folder.string(), &to = job.options.of<MergeOptions>().folder;
  const std::filesystem::path base = base_of(job, checkpoint);
  if (!job.options.lora.is_on()) usage_error("--merge: there are no adapters in ", from, ": name a run that has some with --resume");
  const std::unique_ptr<Model> model = load_model(job, checkpoint, base, 1);
  model->merge_trained();
  write_model(*model->frozen(), base, to);
  std::printf("%s: the model with the adapters of %s, in fp32\n", to.c_str(), from.c_str());
  return 0;
}

inline JobWork lora_command(const Options& o) { return o.of<MergeOptions>().folder.empty() ? nullptr : merge; }
