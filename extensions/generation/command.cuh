// --generate: prints texts sampled from the model of a checkpoint, the first one as it grows.
#pragma once

#include <cstdio>

#include "extensions/generation/generation.cuh"
#include "gpt/command.h"
#include "gpt/rehearsal.cuh"
#include "runtime/checkpoints/loaded_model.cuh"
#include "runtime/traces/tracing.cuh"

inline int generate(Job& job) {
  const Options& o = job.options;
  Tracing tracing(job);
  const std::optional<Checkpoint> checkpoint = generating_checkpoint(job);
  const std::filesystem::path base = base_of(job, checkpoint);
  const std::unique_ptr<Model> owner = load_model(job, checkpoint, base, o.samples);
  Model& model = *owner;
  BatchBuffers buffers(round_up(o.samples * model.positions().length, o.mesh.tp), job.stream);
  const Sampler sampler = sampler_of(o, base);
  rehearse(job, model, buffers, [&] { rehearse_text(job, model, buffers, sampler); });
  const std::string speed = generate_texts(sampler, o.samples, size_t(o.seq_len), TokenByToken(model, buffers));
  if (job.is_first() && !speed.empty()) std::fprintf(stderr, "%s\n", speed.c_str());  // stdout has the texts only
  tracing.finish();
  return 0;
}

inline JobWork generation_command(const Options& o) { return o.of<TextOptions>().generates ? generate : nullptr; }
