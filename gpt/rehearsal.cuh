// The rehearsal. Before the first step each stage goes through its own chunks of layers, in every way in which it will
// compute them: forward and backward of a step, validation, text. There are two reasons:
//   - The algorithms of products are chosen here, for the shapes that will come
//     (kernels/gemm/gemm_choices.cuh). Most of the time goes into timing those that no earlier start has chosen.
//   - A kernel that is launched for the first time may wait until the device is idle. In a step of a pipeline another
//     stage's message may be expected meanwhile; here no stage waits for another. (Receives are posted such that no
//     single wait of this kind could stop a step: with_messages in extensions/pipeline/pipeline.h. But there may be several, and
//     each delays all stages.)
//
// The lanes between stages are silent. The other groups take part, as all ranks of a stage do the same. All tokens are
// 0, and the messages from other stages are zeros. No result, count or trace shows that there was a rehearsal.
#pragma once

#include <cstdio>

#include "gpt/batches.cuh"
#include "gpt/kept_choices.h"
#include "kernels/gemm/gemm_choices.cuh"

// Calls work(), in which the first rank of each stage chooses the algorithms of products: those of the checkpoint, those that rank 0
// has kept, or the fastest. Then all ranks know the choices, and rank 0 keeps the timed ones. Returns its message; empty: there is
// none. Collective over all ranks.
template <class Work>
std::string choose_algorithms(Ranks& ranks, const Mesh& mesh, const KeptChoices& kept, Work work) {
  GemmChoices& choices = gemm_choices();
  choices.library = ranks.all_gather(choices.library)[0];
  choices.takes_first = !kept.by_time();
  const bool keeps = ranks.rank() == 0 && !choices.takes_first;
  choices.earlier = choices_of({ranks.all_gather(keeps ? lines_of(kept.read()) : "")[0]});
  const ProductChoices of_checkpoint = choices.known;
  const bool times = mesh.is_first_of_stage();
  choices.times = times;
  work();
  choices.times = false;
  choices.learn(ranks.all_gather(times ? lines_of(choices.known) : ""));
  ProductChoices timed = choices.known;
  for (const ProductChoices& untimed : {of_checkpoint, choices.earlier})
    for (const auto& [name, choice] : untimed) timed.erase(name);
  return keeps && !timed.empty() ? kept.keep(timed) : "";
}

// passes(): the passes to rehearse. Returns the message of choose_algorithms(). Collective over all ranks.
template <class Passes>
std::string rehearse(Ranks& ranks, Mesh& mesh, Model& model, const KeptChoices& kept, Passes passes) {
  const Unobserved unobserved;
  mesh.rehearse(true);
  const std::string said = choose_algorithms(ranks, mesh, kept, [&] {
    passes();
    CUDA_CHECK(cudaDeviceSynchronize());
  });
  mesh.rehearse(false);
  model.trained_store().forget_passes();
  return said;
}

// The passes of a step and of validation. Of the schedule the first two micro-batches are enough: the first overwrites
// gradients, the second adds to them. buffers, loss_weight: as in the steps.
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

inline std::unique_ptr<KeptChoices> kept_choices(const Options& o) {
  for (const Room* room : rooms())
    if (room->kept_choices) return room->kept_choices(o);
  return std::make_unique<KeptChoices>();
}

// Rehearses the passes that the program will make, if this device needs it. others(): those beside a step's.
template <class Passes>
void rehearse(Job& job, Model& model, BatchBuffers& buffers, Passes others) {
  if (gemm_choices().library.empty() && !loads_kernels_late()) return;
  const std::string said = rehearse(job.ranks, job.mesh, model, *kept_choices(job.options), [&] {
    const bool trains = model.options().store.training;
    if (trains) rehearse_step(model, job.actions(), buffers, float(job.options.loss_weight(true)));
    others();
  });
  if (!said.empty()) std::fprintf(job.options.generate ? stderr : stdout, "products  %s\n", said.c_str());
}
