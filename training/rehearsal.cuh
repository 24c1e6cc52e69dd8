// The rehearsal of a pipeline. Before the first step each stage goes through its own chunks of layers alone, in every
// way in which it will compute them: forward and backward of a step, validation, text. A kernel that is launched for
// the first time, and a library that chooses an algorithm, may wait until the device is idle. In a step another stage's
// message may be expected meanwhile; here nobody waits for anybody. (Receives are posted such that no single wait of
// this kind could stop a step: with_messages in parallel/pipeline.h. But there may be several, and each delays all
// stages.)
//
// The lanes between stages are silent. The other groups take part, as all ranks of a stage do the same. All tokens are
// 0, and what would arrive from other stages is zeros. No result, count or trace shows that there was a rehearsal.
#pragma once

#include "training/generation.cuh"

// passes(): the passes to rehearse. Collective.
template <class Passes>
void rehearse(Mesh& mesh, Model& model, Passes passes) {
  const Unobserved unobserved;
  mesh.rehearse(true);
  passes();
  CUDA_CHECK(cudaDeviceSynchronize());
  mesh.rehearse(false);
  model.store().forget_passes();
}

// The passes of a step and of validation. Of the schedule the first two micro-batches are enough: the first overwrites
// gradients, the second adds to them. buffers, loss_weight: those of the steps.
inline void rehearse_step(Model& model, Actions actions, BatchBuffers& buffers, float loss_weight) {
  const int B = model.options().micro_batch, T = model.options().seq_len;
  const std::vector<int> tokens(size_t(B) * size_t(T));
  Batch batch = buffers.send(tokens.data(), tokens.data(), B, T, model.positions());
  batch.loss_weight = loss_weight;
  std::erase_if(actions, [](const Action& action) { return action.micro_batch > 1; });
  const auto run = [&](const Action& action) {
    batch.action = action;
    batch.action.next_receives = Message::none;  // the next action may have been left out
    batch.first = action.micro_batch == 0;
    batch.last = action.micro_batch == std::ranges::max(actions, {}, &Action::micro_batch).micro_batch;
    model.run(batch);
  };
  std::ranges::for_each(actions, run);
  batch.training = false;
  std::ranges::for_each(forwards(model.stage(), 1), run);
}

// Rehearses what the program will do, if this device needs it. sampler: null if no text is sampled.
inline void rehearse(Job& job, Model& model, BatchBuffers& buffers, const Sampler* sampler) {
  if (job.mesh.shape().pp == 1 || !loads_kernels_late()) return;
  rehearse(job.mesh, model, [&] {
    const bool trains = model.options().store.training;
    if (trains) rehearse_step(model, job.actions(), buffers, float(1 / job.options.tokens()));
    if (sampler) TokenByToken(model, buffers).rehearse(sampler->prompt_tokens(), sampler->length());
  });
}
