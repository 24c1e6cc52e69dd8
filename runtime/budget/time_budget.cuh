// --train-minutes: finds how many steps fit, from a few steps that are timed and then undone.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "extensions/generation/generation.cuh"
#include "gpt/schedule.h"
#include "runtime/checkpoints/state.cuh"

// Sets the schedule's number of steps. Rank 0's clock decides for all ranks. sampler: null if no text is sampled.
inline void choose_steps(TrainingState& state, Batches& batches, const Sampler* sampler) {
  Options& o = state.job.options;
  Model& model = state.model;
  const Unobserved unobserved;  // traces must not show steps that are undone
  const Clock::time_point begin = Clock::now();
  const Actions actions = state.job.actions();
  std::vector<double> seconds;
  constexpr size_t unmeasured = 2, measured = 5;  // the first steps allocate memory and load kernels
  for (size_t step = 0; step < unmeasured + measured; ++step) {  // with a learning rate of 0
    const Clock::time_point start = Clock::now();
    model.begin_sums();
    run_step(model, actions, batches.of_step({step}), adamw_at(o, 0), float(o.grad_clip));
    model.sums();
    if (step >= unmeasured) seconds.push_back(seconds_since(start));
  }
  double outer_step = 0;
  for (int time = 0; o.outer.is_on() && time < 2; ++time) {
    const Clock::time_point start = Clock::now();
    model.store().outer_step(false);
    CUDA_CHECK(cudaStreamSynchronize(model.stream()));
    outer_step = std::max(0.0, seconds_since(start) - o.outer.delay * median(seconds)) / o.outer.local_steps;
  }
  double validation = 0;
  for (int time = 0; !o.val.empty() && time < 2; ++time) {
    const Clock::time_point start = Clock::now();
    validation_losses(model, batches, o, 1);
    validation = double(o.val_batches) * seconds_since(start);
  }
  const Clock::time_point start = Clock::now();
  if (sampler) sampler->text(0, TokenByToken(model, batches.buffers()));
  const double sample = seconds_since(start);
  state.model.store().clear();
  start_afresh(state);
  const double left = 60 * o.train_minutes - seconds_since(begin);
  const double each = median(seconds) + outer_step + (o.sample_every ? sample / double(o.sample_every) : 0);
  const double share = o.sample_seconds > 0 ? o.sample_seconds / (o.sample_seconds + sample) : 1;  // of the time without samples
  if (left < each)
    std::printf("--train-minutes %g: the time was over when %zu steps had been timed; one step follows\n", o.train_minutes, unmeasured + measured);
  const size_t steps = steps_within(left * share, each, validation, o.val_every);
  o.schedule.steps = std::stoull(state.job.control.all_gather(std::to_string(steps))[0]);
  if (const std::string problem = attempt([&] { validate(o.schedule); }); !problem.empty())
    usage_error("--train-minutes ", o.train_minutes, " is ", o.schedule.steps, " steps here: ", problem);
}
