// The parts of a training run, and the questions that its rooms may ask of it (gpt/step_hook.h). Trainer goes through
// its steps. An existing run is changed only when everything that may fail has been done.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpt/base/process.h"
#include "gpt/schedule.h"
#include "gpt/setup.cuh"
#include "gpt/step_hook.h"
#include "runtime/checkpoints/checkpoints.cuh"
#include "runtime/checkpoints/run_start.cuh"
#include "runtime/reports/telemetry.cuh"

class TrainingRun {
 public:
  // The members are initialised in this order, which is the start of a run. before_model() of a hook may use only those from `job`
  // to `hooks`.
  Job& job;
  Options& o = job.options;
  Tracing tracing{job};
  const Datasets data = open_data(o);
  StartOfRun start{job, data};
  const std::vector<std::unique_ptr<StepHook>> hooks = step_hooks(*this);
  const std::unique_ptr<Model> model = checked_model();
  Bill bill{o.of<ReportOptions>().price, job.ranks.size(), process_start};  // a resumed run adds the costs of its earlier starts
  Batches batches{job, *model, data, bill.lost.data};
  TrainingState state{job, data, *model, start.copies(), Guard(o.of<GuardOptions>()), {}};
  Actions actions = job.actions();
  std::optional<Checkpoints> checkpoints = {};  // when all else has its memory
  std::optional<Telemetry> telemetry = {};      // when the run folder is this run's
  bool is_stopping = false;                     // all ranks know that one was asked to stop

  explicit TrainingRun(Job& its_job) : job(its_job) {}

  size_t steps_done() const { return state.progress.step; }  // of the whole run
  // Have all steps of the run been done, or has --patience ended it?
  bool is_finished() const { return steps_done() >= o.schedule.steps || state.is_out_of_patience(); }
  bool done() const { return is_finished() || (is_stopping && all_meet()); }

  // The number of steps after which all ranks meet.
  size_t steps_between() const {
    size_t steps = 1;
    for (const auto& hook : hooks) steps = std::max(steps, hook->steps_between());
    return steps;
  }
  // Do all ranks meet after this step? After the last one they do.
  bool all_meet() const { return steps_done() % steps_between() == 0 || steps_done() >= o.schedule.steps; }
  // Is an event of every `steps` steps due now? One that became due since ranks met waits until they meet again. 0: never
  bool every(size_t steps) const {
    const size_t between = steps_between();
    return steps > 0 && all_meet() && steps_done() / steps > (steps_done() - 1) / between * between / steps;
  }
  bool validates() const { return !o.val.empty() && (is_finished() || every(o.val_every)); }
  // To be asked after the validation: whether this step is the best, a checkpoint has to know, too.
  bool saves() const { return !o.out.empty() && (done() || every(o.checkpoint_every) || state.is_best()); }
  // Does the host look at the weights after this step, as far as it knows by now?
  bool looks_at_weights() const {
    return done() || validates() || saves() ||
           std::ranges::any_of(hooks, [](const auto& hook) { return hook->looks_at_weights(); });
  }

  // Why this rank asks all to stop; empty: it does not.
  std::string stops() const {
    std::string why = job.interruption.reason();
    for (auto hook = hooks.begin(); why.empty() && hook != hooks.end(); ++hook) why = (*hook)->stops();
    return why;
  }
  // The learning rate of the next update. Gradients are applied by that of their step: with --delay the one before.
  double rate_of_update() const { return learning_rate(o.schedule, std::max(steps_done(), size_t(o.delay)) - size_t(o.delay)); }

  // Deals a step's micro-batches anew.
  void share_out(const std::vector<int>& shares) {
    o.shares = shares;
    batches.deal_anew();
    actions = job.actions();
  }

 private:
  std::unique_ptr<Model> checked_model() {
    const bool resumes = start.checkpoint().has_value();
    decide_shape(o, folder_of_model(o, start.weights(), resumes), resumes, data);
    if (resumes && !o.attention_given) o.attention = stored_attention(start.weights());  // if it says so: the run keeps its bits
    for (const auto& hook : hooks) hook->before_model();
    return build_model_of_run(o, job.mesh, job.stream);
  }
};
