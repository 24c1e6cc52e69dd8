// How a run goes through its steps. train() in train_gpt.cu says what happens in a step, gpt/training_run.cuh what a run
// consists of, gpt/step_hook.h how rooms take part.
#pragma once

#include <cstdio>
#include <optional>
#include <string>

#include "gpt/end_job.cuh"
#include "gpt/rehearsal.cuh"
#include "gpt/training_run.cuh"

class Trainer : public TrainingRun {
 public:
  // Builds the model, and loads or initializes it.
  explicit Trainer(Job& its_job) : TrainingRun(its_job) {
    start_from(state, start.checkpoint());
    end_job_on_error(job.ranks, [&] {
      rehearse(job, *model, batches.buffers(), [&] { for (const auto& hook : hooks) hook->rehearse(); });
      for (const auto& hook : hooks) hook->prepare();
    });
    start.copies().release();  // the weights have been read
    checkpoints.emplace(state, bill, start.checkpoint(), start.tokenizer());
    if (o.resume && !start.checkpoint()) std::printf("--resume: no checkpoint in %s, starting afresh\n", o.out.c_str());
  }

  // Describes the run on the terminal, claims the run folder, and opens the logs.
  void begin() {
    std::string of_rooms;
    for (const auto& hook : hooks) of_rooms += hook->description();
    describe(job, *model, data, of_rooms, steps_done());
    job.interruption.begin_training();
    start.claim(bill, steps_done());
    checkpoints->describe();
    telemetry.emplace(job, *model, tracing, bill, steps_done());
    in_flight_.emplace(*model, job.mesh, o.dtype == "fp16");
    for (const auto& hook : hooks) hook->begin();
  }

  // A step: micro-batches in the order of the actions, then the update. The device may still be at it when this
  // returns: its result is looked at one step later, unless the host needs it first. Returns false if training went
  // back to a checkpoint.
  bool step() {
    const double rate = learning_rate(o.schedule, steps_done()), waited = bill.lost.data;
    const StepLimits limits = state.guard.limits(in_flight_->count() > 0);
    vote();
    const bool applies = !o.delay || model->trained_store().waits();
    run_step(*model, actions, batches.of_step(state.progress), adamw_at(o, rate_of_update()), float(o.grad_clip),
             state.guard.enforced(limits));
    ++state.progress.step;
    for (const auto& hook : hooks) hook->after_update();
    in_flight_->end(steps_done(), rate, applies ? std::optional(limits) : std::nullopt, bill.lost.data - waited, all_meet());
    telemetry->end_step();
    while (in_flight_->count() > (needs_result() ? 0 : 1))  // asked again after each result, because one may stop the run
      if (!judge_oldest()) return false;
    for (const auto& hook : hooks) hook->end_step();
    return true;
  }

  void validate() {
    const ValidationLosses losses = timed(bill.lost.evaluation, [&] { return validation_losses(*model, batches, o, o.val_batches); });
    state.best.add(losses[0].second, steps_done());
    is_stopping &= !is_finished();
    telemetry->validated(steps_done(), losses);
  }
  void save() {
    if (job.is_first()) data.train->require_unchanged();
    checkpoints->save(done());
  }
  void end_step() {
    for (const auto& hook : hooks) hook->between_steps();
    telemetry->show_progress(steps_done());
  }

  // After an error: if the data turn out to be bad, the steps that were started before are still good, and are logged.
  // No rank may be met any more: the others may wait for this one's part of a step that it cannot start.
  void log_started_steps() {
    while (in_flight_->count() > 0 && in_flight_->ends_within(10)) telemetry->finished(in_flight_->finish(), steps_done(), false);
  }

  // Returns the exit code.
  int finish() {
    checkpoints->complete();
    telemetry->summarize(steps_done());
    std::printf("%s", end_text(state, is_stopping).c_str());
    for (const auto& hook : hooks)
      if (const std::optional<int> code = hook->end()) return *code;
    if (!is_stopping) return 0;
    const std::string why = stops();
    std::printf("%s: stopped after step %zu%s\n", why.empty() ? "another rank was asked to stop" : why.c_str(), steps_done(),
                o.out.empty() ? "" : ", and saved: go on with --resume");
    return interrupted_exit_code;
  }

 private:
  // Zeroes the step's sums on the device, and puts this rank's votes beside the loss.
  void vote() {
    telemetry->begin_step(steps_done() + 1);
    const bool asks = std::ranges::any_of(hooks, [](const auto& hook) { return hook->asks(); });
    in_flight_->begin(!stops().empty(), checkpoints->is_written(), asks, telemetry->times_collectives(steps_done() + 1));
  }

  // Does the host need the last step's result before it goes on? Where ranks meet only at some steps, they learn there whether
  // all of them stop.
  bool needs_result() const { return looks_at_weights() || (steps_between() > 1 && all_meet()) || tracing.wanted(); }

  // Waits for the oldest step in flight and looks at its result. Returns false if training went back to a checkpoint.
  bool judge_oldest() {
    const FinishedStep finished = in_flight_->finish();
    telemetry->finished(finished, steps_done());
    for (const auto& hook : hooks) hook->finished(finished);
    is_stopping |= finished.stop && steps_done() < o.schedule.steps;
    if (finished.saved) checkpoints->complete();
    if (!finished.limits) return true;
    const StepResult& result = finished.result;
    const Guard::Judgement judgement = state.guard.judge(finished.judged_loss, result.norm, result.applied, *finished.limits);
    if (judgement.reason.empty()) return true;
    const bool rolls_back = judgement.action == Guard::Response::roll_back && checkpoints->can_roll_back();
    telemetry->went_wrong(result, judgement.reason, rolls_back);
    if (!rolls_back) return true;
    double seconds = in_flight_->drop();
    const Rollback rollback = timed(seconds, [&] { return checkpoints->roll_back(result.step, judgement.reason); });
    telemetry->rolled_back(rollback, seconds);
    return false;
  }

  std::optional<StepsInFlight> in_flight_;
};
