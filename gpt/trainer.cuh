// What a training run consists of. All that may fail comes first; begin() is the first to change a run that is there.
// train() in train_gpt.cu says what happens in a step.
#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "extensions/islands/outer_steps.cuh"
#include "gpt/base/process.h"
#include "gpt/end_job.cuh"
#include "gpt/rehearsal.cuh"
#include "gpt/schedule.h"
#include "runtime/budget/time_budget.cuh"
#include "runtime/checkpoints/checkpoints.cuh"
#include "runtime/checkpoints/run_folder.h"
#include "runtime/checks/mesh_check.cuh"
#include "runtime/checks/rank_check.cuh"
#include "runtime/checks/sync_check.cuh"
#include "runtime/control/agreement.h"
#include "runtime/planner/calibration.cuh"
#include "runtime/planner/program.cuh"
#include "runtime/reports/telemetry.cuh"

// No run that is there is changed before all that may fail has been done.
class Trainer {
 public:
  explicit Trainer(Job& job)
      : job_(job), o_(job.options), tracing_(job), data_(open_data(o_)), start_{o_.overwrite, o_.resume, o_.resume_from, o_.init},
        lock_(lock_of(job)), checkpoint_(agreed_checkpoint()), copies_(job.ranks, o_.out), folder_(folder_of_weights()),
        model_(checked_model()), bill_(o_.price, job.control.size(), process_start), batches_(job, *model_, data_, bill_),
        state_{job, data_, *model_, copies_, Guard(o_.of<GuardOptions>()), {}} {
    if (checkpoint_ && model_->frozen()) load_initial_weights(job, *model_, o_.init);
    if (checkpoint_) load_checkpoint(state_, *checkpoint_), take_stored_shares();
    else start_afresh(state_);
    const std::filesystem::path tokenizer_folder = !folder_.empty() ? folder_ : std::filesystem::path(o_.out);
    if (o_.samples_in_training()) sampler_.emplace(sampler_of(o_, tokenizer_folder));
    end_job_on_error(job.control, [&] {
      rehearse(job, *model_, batches_.buffers(), sampler());
      if (o_.train_minutes > 0 && !checkpoint_) choose_steps(state_, batches_, sampler());
    });
    copies_.release();  // the weights and the tokenizer have been read
    checkpoints_.emplace(state_, bill_, checkpoint_, tokenizer_folder);
    if (o_.resume && !checkpoint_) std::printf("--resume: no checkpoint in %s, starting afresh\n", o_.out.c_str());
  }

  // Have all steps of the run been done, or has --patience ended it?
  bool is_finished() const { return steps_done() >= o_.schedule.steps || is_out_of_patience(); }
  bool is_out_of_patience() const { return o_.patience > 0 && state_.best.since >= o_.patience; }
  std::string how_finished() const {
    const auto& [loss, step, since] = state_.best;
    if (!is_out_of_patience())
      return formatted("the checkpoint has %zu of %zu steps; a larger --steps goes on", steps_done(), o_.schedule.steps);
    return formatted("the last %zu validations were not below the best, val_loss %.4f after step %zu%s; a larger --patience goes on",
                     since, loss, step, misses_best() ? (", which is not in " + o_.out).c_str() : "");
  }
  // Does the run folder lack the checkpoint of the best validation, as only a newer one was brought there?
  bool misses_best() const {
    return o_.keep_best && !o_.out.empty() && state_.best.step > 0 &&
           !std::filesystem::exists(o_.out / std::filesystem::path(checkpoint_name(state_.best.step)));
  }

  // Claims the run folder, says what will be trained, and opens the logs.
  void begin() {
    const RankPlan own = rank_plan(*model_, job_.mesh, job_.control.rank(), batches_.buffers().memory().categories(),
                                   checkpoints_->snapshot_bytes());
    plan_ = gathered_plan(job_.control, device_, own);
    plan_->steps = o_.schedule.steps;
    const std::string problem = attempt([&] {
      if (const std::optional<Cluster> cluster = known_cluster(o_, job_.device, job_.control.size()))
        plan_->time = planned_time(o_, *cluster, planned_run(o_)), forecast_ = plan_->time->forecast;
    });
    if (!o_.cluster.empty()) refuse(problem);  // else links of these devices are not known, which ends no run
    describe(job_, *model_, data_, memory_text(*plan_), steps_done());
    if (misses_best())
      std::printf("best      so far val_loss %.4f after step %zu, whose checkpoint is not in %s: bring %s there, too; else OUT/best "
                  "waits for a lower one\n", state_.best.loss, state_.best.step, o_.out.c_str(), checkpoint_name(state_.best.step).c_str());
    print_batch_hint(o_, planned_run(o_));
    if (const std::string hint = dtype_hint(job_.device, o_.dtype); !hint.empty() && !checkpoint_) std::printf("%s\n", hint.c_str());
    job_.interruption.begin_training(o_.max_hours);
    job_.ranks.all_gather("");  // wait until all ranks have read the run folder, before rank 0 changes it
    if (checkpoint_ && continues(o_.out, start_, checkpoint_)) bill_.restore(metrics_path(o_.out), steps_done());
    if (lock_) claim_run_folder(o_.out, start_, checkpoint_);
    checkpoints_->report_slow_ranks();
    telemetry_.emplace(job_, *model_, tracing_, bill_, steps_done());
    in_flight_.emplace(*model_, job_.mesh, o_.dtype == "fp16");
    sampled_ = Clock::now();
  }

  bool done() const { return is_finished() || (stopping_ && all_meet()); }

  // A step: micro-batches in the order of the actions, then the update. The device may still be at it when this
  // returns: its result is looked at one step later, unless the host needs it first. Returns false if training went
  // back to a checkpoint.
  bool step() {
    const double learning_rate = ::learning_rate(o_.schedule, steps_done());
    const StepLimits limits = state_.guard.limits(in_flight_->count() > 0);
    // What the device itself refuses to apply. With --on-spike log that is only what is not finite.
    const StepLimits enforced = state_.guard.prevents_updates() ? limits : StepLimits{};
    const double waited = bill_.lost.data;
    telemetry_->begin_step(steps_done() + 1);
    // Zeroes the step's sums on the device, and puts this rank's votes beside the loss: was it asked to stop, has it
    // written its part of the checkpoint, and (rank 0 decides) are --sample-seconds over?
    const bool wants_sample = job_.is_first() && o_.sample_seconds > 0 && seconds_since(sampled_) >= o_.sample_seconds;
    in_flight_->begin(job_.interruption.asked() || job_.hooks.asks_to_stop(), checkpoints_->is_written(), wants_sample,
                      telemetry_->times_collectives(steps_done() + 1));
    const bool applies = !o_.delay || model_->store().waits();
    run_step(*model_, actions_, batches_.of_step(state_.progress), adamw_at(o_, rate_of_update()), float(o_.grad_clip), enforced);
    ++state_.progress.step;
    if (outer_steps_.is_on()) outer_steps_.after_update(steps_done(), all_meet(), looks_at_weights());
    in_flight_->end(steps_done(), learning_rate, applies ? std::optional(limits) : std::nullopt, bill_.lost.data - waited, all_meet());
    telemetry_->end_step();
    bill_.failed_hooks = job_.hooks.failures();
    while (in_flight_->count() > most_in_flight())
      if (!judge_oldest()) return false;
    if (done()) outer_steps_.finish();  // all have been told to stop
    if (o_.delay && steps_done() >= o_.schedule.steps) apply_last();
    if (o_.measures_shares && telemetry_->steps() == 10) correct_shares();
    return true;
  }

  // Do all ranks meet after this step? Islands do at outer steps, of which the last step is one.
  bool all_meet() const { return steps_done() % outer_steps_.steps_between() == 0 || steps_done() >= o_.schedule.steps; }
  // Is one due after this step? Islands wait for an outer step with what became due since the one before. 0: never
  bool every(size_t steps) const {
    const size_t between = outer_steps_.steps_between();
    return steps > 0 && all_meet() && steps_done() / steps > (steps_done() - 1) / between * between / steps;
  }
  bool validates() const { return !o_.val.empty() && (is_finished() || every(o_.val_every)); }
  // To be asked after validate(): whether this step is the best, a checkpoint has to know, too.
  bool saves() const { return !o_.out.empty() && (done() || every(o_.checkpoint_every) || (o_.keep_best && state_.best.step == steps_done())); }
  bool samples() const { return (sample_due_ && !stopping_) || every(o_.sample_every); }

  void check_sync() {
    const AddTime timer(bill_.lost.evaluation);
    for (Parameters* parameters : {&model_->store(), model_->frozen()})
      if (parameters) ::check_sync(job_.control, *parameters, steps_done(), job_.stream);
  }
  void save() {
    if (job_.is_first()) data_.train->require_unchanged();
    checkpoints_->save(done());
  }
  void validate() {
    const ValidationLosses losses =
        timed(bill_.lost.evaluation, [&] { return validation_losses(*model_, batches_, o_, o_.val_batches); });
    state_.best.add(losses[0].second, steps_done());
    stopping_ &= !is_finished();
    telemetry_->validated(steps_done(), losses);
  }
  void sample() {
    const auto draw = [&] { return sampler_->text(steps_done(), TokenByToken(*model_, batches_.buffers())); };
    try {
      telemetry_->sampled(steps_done(), timed(bill_.lost.samples, draw));
    } catch (const NotFinite& problem) {
      std::printf("no sample after step %zu: %s\n", steps_done(), problem.what());
    }
    sample_due_ = false;
    sampled_ = Clock::now();
  }
  void show_progress() { telemetry_->show_progress(steps_done()); }

  // After an error: if the data turn out to be bad, the steps that were started before are still good, and are logged.
  // No rank may be met any more: the others may wait for this one's part of a step that it cannot start.
  void log_started_steps() {
    while (in_flight_->count() > 0 && in_flight_->ends_within(10)) telemetry_->finished(in_flight_->finish(), steps_done(), false);
  }

  // Returns the exit code.
  int finish() {
    checkpoints_->complete();
    telemetry_->summarize(steps_done());
    if (const size_t left_out = state_.guard.left_out())
      std::printf("left out  %zu of %zu updates: loss or gradient norm was not finite, or a spike\n", left_out, steps_done());
    if (is_out_of_patience()) std::printf("--patience: done after step %zu, as %s\n", steps_done(), how_finished().c_str());
    if (!stopping_ && !o_.out.empty()) std::printf("%s", next_commands(o_, job_.control.size(), is_out_of_patience()).c_str());
    if (calibration_ && interrupting_signal == 0)
      return complete_calibration(job_, *calibration_, telemetry_->measured(), forecast_), 0;
    if (forecast_) print_line(comparison_text(*forecast_, telemetry_->measured()));
    if (!stopping_) return 0;
    const bool by_hook = job_.hooks.asks_to_stop() && !job_.interruption.asked();
    const std::string reason = by_hook ? "--stop-when" : job_.interruption.reason();
    if (reason == "--max-hours") job_.hooks.stop_reason = "time";
    std::printf("%s: stopped after step %zu%s\n", reason.c_str(), steps_done(),
                o_.out.empty() ? "" : ", and saved: go on with --resume");
    return interrupted_exit_code;
  }

  size_t steps_done() const { return state_.progress.step; }  // of the whole run

 private:
  // Rank 0 has it: while it lives, no other run writes to this folder.
  static std::optional<RunFolderLock> lock_of(const Job& job) {
    if (!job.is_first() || job.options.out.empty()) return {};
    return std::optional<RunFolderLock>(std::in_place, job.options.out);
  }
  std::optional<Checkpoint> agreed_checkpoint() const {
    if (lock_) job_.hooks.has_folder();
    require_agreement(job_.control, "data", {data_.identity.train.text(), nlohmann::json(data_.identity.val).dump()}, "all ranks must see the same files");
    return choose_shared_checkpoint(o_.out, start_, job_.ranks);
  }
  // Ranks that don't share rank 0's disk read its checkpoint from a copy.
  std::filesystem::path folder_of_weights() { return checkpoint_ ? copies_.folder_of(checkpoint_->folder) : std::filesystem::path(o_.init); }
  std::unique_ptr<Model> checked_model() {
    if (o_.check_ranks || o_.measures_shares) {
      const RankSpeed speed = check_ranks(o_.dtype, job_.control, job_.mesh, job_.stream, o_.check_ranks);
      if (o_.measures_shares) o_.shares = shares_by_time(job_, 1 / speed.product);
    }
    if (!o_.calibrate.empty()) calibration_ = begun_calibration(job_);
    decide_shape(o_, folder_of_model(o_, folder_, checkpoint_.has_value()), checkpoint_.has_value(), data_);
    decide_attention(o_, checkpoint_ ? folder_ : std::filesystem::path());
    if (o_.check_mesh) check_mesh(job_, data_);
    device_ = this_device(job_.device);
    std::unique_ptr<Model> model = build_model_to_train(o_, job_.mesh, job_.stream);
    const std::string& problem = model->attention_problem();
    if (!problem.empty() && o_.attention != "auto")
      std::printf("attention by other kernels than before (%s), so bits differ: %s\n", o_.attention.c_str(), problem.c_str());
    // Checkpoints store who computes it.
    if (!problem.empty() || o_.attention == "auto") o_.attention = problem.empty() ? "cudnn" : "own";
    return model;
  }

  // ---- --shares auto

  void share_out(const std::vector<int>& shares) {
    o_.shares = shares;
    batches_.deal_anew();
    actions_ = job_.actions();
  }
  // Shares of a job with as many data-parallel ranks, and as many micro-batches in a step, are a better start than the rank
  // check's.
  void take_stored_shares() {
    const std::vector<int>& stored = state_.stored_shares;
    if (o_.measures_shares && stored.size() == o_.shares.size() && o_.deal().all() == Deal(stored).all()) share_out(stored);
  }
  // By the time of the steps so far, without that in which a rank only waited for others.
  void correct_shares() {
    const MeasuredStep step = telemetry_->measured();
    const std::vector<int> shares = shares_by_time(job_, (step.seconds - step.exposed) / o_.deal().of_rank(o_.batch_rank(job_.mesh.place())));
    if (shares == o_.shares) return;
    std::printf("--shares auto: by the first steps, %s micro-batches from now on\n", shares_text(shares).c_str());
    share_out(shares);
  }

  const Sampler* sampler() const { return sampler_ ? &*sampler_ : nullptr; }

  // How many steps may be in flight when the host goes on? One, unless the host needs the last step's result first: at an
  // outer step it learns whether all islands stop.
  size_t most_in_flight() const {
    const bool needs_result = looks_at_weights() || (outer_steps_.is_on() && all_meet()) || tracing_.wanted();
    return needs_result ? 0 : 1;
  }
  // Does the host look at the weights after this step, as far as it knows by now?
  bool looks_at_weights() const { return done() || validates() || saves() || every(o_.check_sync) || samples(); }

  // Gradients are applied by the learning rate of their step: with --delay that is the one before.
  double rate_of_update() const { return learning_rate(o_.schedule, std::max(steps_done(), size_t(o_.delay)) - size_t(o_.delay)); }

  // --delay: after the last step its gradients are applied, too. There is no step to go back to.
  void apply_last() {
    const StepLimits limits = state_.guard.limits(false);
    model_->begin_sums();
    model_->update(adamw_at(o_, rate_of_update()), float(o_.grad_clip), state_.guard.prevents_updates() ? limits : StepLimits{});
    const GradientSummary gradients = model_->gradient_summary();
    const Guard::Judgement judgement = state_.guard.judge(gradients.loss, gradients.norm, gradients.applied(), limits);
    const StepResult result = {steps_done(), gradients.loss, gradients.norm, rate_of_update(), 0, gradients.applied(), 0};
    if (!judgement.reason.empty()) telemetry_->went_wrong(result, judgement.reason, false);
  }

  // Waits for the oldest step in flight and looks at its result. Returns false if training went back to a checkpoint.
  bool judge_oldest() {
    const FinishedStep finished = in_flight_->finish();
    telemetry_->finished(finished, steps_done());
    if (lock_ && plan_) write_plan(o_.out, *plan_);  // a run that fails in its first step leaves nothing behind
    plan_.reset();
    stopping_ |= finished.stop && steps_done() < o_.schedule.steps;
    sample_due_ |= finished.sample;
    if (finished.saved) checkpoints_->complete();
    const StepResult& result = finished.result;
    if (!finished.limits) return true;
    const Guard::Judgement judgement = state_.guard.judge(finished.judged_loss, result.norm, result.applied, *finished.limits);
    if (judgement.reason.empty()) return true;
    const bool rolls_back = judgement.action == Guard::Response::roll_back && checkpoints_->can_roll_back();
    telemetry_->went_wrong(result, judgement.reason, rolls_back);
    if (!rolls_back) return true;
    double seconds = in_flight_->drop();
    const Rollback rollback = timed(seconds, [&] { return checkpoints_->roll_back(result.step, judgement.reason); });
    telemetry_->rolled_back(rollback, seconds);
    return false;
  }

  Job& job_;
  Options& o_;
  Tracing tracing_;
  const Datasets data_;
  const RunStart start_;
  std::optional<RunFolderLock> lock_;
  const std::optional<Checkpoint> checkpoint_;  // to start from
  CheckpointCopies copies_;
  const std::filesystem::path folder_;  // of the weights to start from; empty: there are none
  std::optional<nlohmann::ordered_json> calibration_;  // the file of --calibrate, which is not complete yet
  PlannedDevice device_;
  const std::unique_ptr<Model> model_;
  Bill bill_;  // what the run costs since the process started; a resumed run adds its earlier costs in begin()
  Batches batches_;
  TrainingState state_;
  std::optional<Sampler> sampler_;
  Actions actions_ = job_.actions();
  OuterSteps outer_steps_{o_.outer, *model_};
  std::optional<Checkpoints> checkpoints_;
  std::optional<Plan> plan_;
  std::optional<Forecast> forecast_;  // of a step; none: the devices are not known
  std::optional<Telemetry> telemetry_;
  std::optional<StepsInFlight> in_flight_;
  bool stopping_ = false, sample_due_ = false;  // sample_due: by --sample-seconds
  Clock::time_point sampled_;
};
