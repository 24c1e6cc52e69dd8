// The output of a job on the terminal and in its logs: the set-up, each step, and a summary at the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "gpt/base/text.h"
#include "gpt/batches.cuh"
#include "gpt/steps_in_flight.cuh"
#include "runtime/checkpoints/run_folder.h"
#include "runtime/checkpoints/state.cuh"
#include "runtime/reports/bill.h"
#include "runtime/reports/console.h"
#include "runtime/reports/hardware.h"
#include "runtime/reports/metrics.h"
#include "runtime/reports/options.h"
#include "runtime/reports/report.h"
#include "runtime/traces/tracing.cuh"

// FLOP/s of one device; 0: not known
inline double peak_of(const Job& job) { return peak_flops(job.device, job.options.dtype == "fp32"); }

inline std::string attention_body(const Options& o, const Model& model) {
  if (o.attention == "hopper") return "own kernels for Hopper";
  if (o.attention == "cudnn") return model.library_attention();
  return "own kernels" + (model.attention_problem().empty() ? "" : ": " + model.attention_problem());
}

inline void describe_model(const Options& o) {
  const ModelShape& s = o.shape;
  std::printf("model     %d layers, %d heads, %d channels, vocabulary %d, %d positions: %s parameters, %s%s%s%s%s\n", s.layers,
              s.heads, s.channels, s.vocabulary, s.positions, with_commas(double(TensorList(s).parameters())).c_str(),
              o.dtype.c_str(), o.stochastic_rounding ? " with stochastic rounding" : "",
              o.moments == "bf16" ? ", moments in bf16" : "",
              o.fp8 ? formatted(", products of %d blocks in fp8%s", s.layers - 2 * o.fp8_keep, o.fp8_scale == "tiles" ? " by tiles" : "").c_str() : "",
              o.is_dtype_chosen ? " (no --dtype was given)" : "");
  for (const Room* room : rooms())
    if (room->trained_tensors && o.lora.is_on())
      std::printf("adapters  %s: %s parameters, and nothing else is trained\n", o.lora.text().c_str(),
                  with_commas(double(TensorList(TensorList(s), room->trained_tensors(o)).parameters())).c_str());
}

inline void describe_mesh(const Options& o) {
  const auto& [tp, cp, dp, pp, islands] = o.mesh;
  if (o.mesh.ranks() == 1) return;
  std::string split;
  if (islands > 1) split += formatted("%d islands, each ", islands);
  if (tp > 1) split += formatted("tensor parallel %d, ", tp);
  if (o.tp_pieces > 1) split += formatted("rows in %d pieces, ", o.tp_pieces);
  if (cp > 1) split += formatted("context parallel %d (%s), ", cp, o.cp_method.c_str());
  const std::string chunks = o.pp_chunks > 1 ? formatted(", %d chunks each", o.pp_chunks) : "";
  if (pp > 1) split += formatted("pipeline of %d stages (%s%s), ", pp, o.pp_schedule.c_str(), chunks.c_str());
  std::printf("mesh      %sdata parallel %d, ZeRO %d, gradients travel in %s\n", split.c_str(), dp, o.zero,
              (o.compresses_gradients() ? o.compress : o.reduce_dtype).c_str());
}

inline void describe_batch(const Options& o) {
  std::printf("batch     %d samples in micro-batches of %d: %s tokens per step", o.global_batch, o.micro_batch,
              with_commas(o.tokens()).c_str());
  if (!o.shares.empty()) std::printf("; micro-batches by data-parallel rank: %s", text_of_counts(o.deal().counts()).c_str());
  if (o.delay) std::printf("; gradients are applied a step later");
  std::printf("\n");
}

// A process that was bound to some of the host's cores at its start stays there, which may cost speed unnoticed.
inline std::string bound_cores() {
  const long all = sysconf(_SC_NPROCESSORS_ONLN);
  cpu_set_t own;
  if (sched_getaffinity(0, sizeof own, &own) != 0 || CPU_COUNT(&own) >= all) return "";
  return formatted(", on %d of %ld cores (bound by what started it; mpirun binds unless --bind-to none is given)", CPU_COUNT(&own), all);
}

// of_rooms: lines that rooms add; start: steps done before this start.
inline void describe(const Job& job, const Model& model, const Datasets& data, const std::string& of_rooms, size_t start) {
  const Options& o = job.options;
  describe_model(o);
  std::printf("device    %s%s\n", job.device.c_str(), bound_cores().c_str());
  if (!model.library_attention().empty() || o.attention == "hopper")
    std::printf("attention %s\n", attention_body(o, model).c_str());
  describe_mesh(o);
  std::printf("data      %s tokens in %zu files (%s): %zu samples of %d", with_commas(double(data.train->tokens())).c_str(),
              data.train->files(), data.train->is_text() ? "text, a byte is a token" : "token shards",
              data.train->samples(o.seq_len), o.seq_len);
  if (!o.val.empty())
    std::printf("; validation on %zu%s", o.val_batches * size_t(o.global_batch), o.val.size() > 1 ? " of each set" : "");
  std::printf("\n");
  describe_batch(o);
  std::printf("%s", of_rooms.c_str());
  if (const size_t bytes = 12 * model.trained_tensors().parameters(); o.of<CheckpointFiles>().keep_best)
    std::printf("best      each better validation saves a checkpoint of %s beside --keep %zu; training waits %.1g s for its copy, at %g GB/s\n",
                bytes_text(bytes).c_str(), o.keep, double(bytes) / o.mesh.ranks() / snapshot_rate, snapshot_rate / 1e9);
  std::printf("work      %s + 6LCT = %.3f GFLOP per token", o.lora.is_on() ? "4Ψ + 6 for each parameter of an adapter" : "6Ψ",
              model.flops_per_token() / 1e9);
  if (peak_of(job) > 0) std::printf("; MFU against %.0f TFLOP/s (dense %s)", peak_of(job) / 1e12, o.dtype.c_str());
  std::printf("\nsteps     %zu to %zu", start + 1, o.schedule.steps);
  if (o.train_minutes > 0) std::printf(" (%g minutes)", o.train_minutes);
  std::printf(", learning rate %g (%s), output %s\n", o.schedule.lr, o.schedule.kind.c_str(),
              o.out.empty() ? "none" : o.out.c_str());
  if (const std::string hint = dtype_hint(job.device, o.dtype); !hint.empty() && start == 0) std::printf("%s\n", hint.c_str());
  std::fflush(stdout);
}

// Commands to try after a run, for a shell in the folder where it was started. by_patience: --patience ended it
inline std::string next_commands(const Options& o, int ranks, bool by_patience) {
  const std::string out = quoted(o.out), dtype = o.dtype == "fp32" ? "" : " --dtype " + o.dtype;
  const std::string limit = by_patience ? "--patience" : "--steps";
  const size_t twice = 2 * (by_patience ? o.of<CheckpointFiles>().patience : o.schedule.steps);
  return "to sample " + quoted(o.words[0]) + " --generate --resume " + out + " --seq-len " + std::to_string(o.seq_len) + dtype +
         "\nto extend " + command_without({limit, by_patience ? "" : "--train-minutes", "--resume", "--overwrite"}, o.words) +
         " --resume " + limit + ' ' + std::to_string(std::min(twice, Options::most_steps)) + (ranks > 1 ? "  # on every rank" : "") +
         (std::filesystem::exists("dev/plot.py") ? "\nto plot   python3 dev/plot.py " + out : "") + '\n';
}

// The last lines of a run. is_stopping: it was asked to, before its last step.
inline std::string end_text(const TrainingState& state, bool is_stopping) {
  const Options& o = state.job.options;
  const size_t steps = state.progress.step, left_out = state.guard.left_out();
  std::string text;
  if (left_out) text += formatted("left out  %zu of %zu updates: loss or gradient norm was not finite, or a spike\n", left_out, steps);
  if (state.is_out_of_patience()) text += formatted("--patience: done after step %zu, as %s\n", steps, how_finished(state).c_str());
  return is_stopping || o.out.empty() ? text : text + next_commands(o, state.job.ranks.size(), state.is_out_of_patience());
}

class Telemetry {
 public:
  static constexpr size_t unprofiled = 2;  // the first steps allocate memory and load kernels

  // start: steps done before this start. The first line of metrics creates the file, so a run that fails before leaves
  // nothing behind.
  Telemetry(Job& job, const Model& model, Tracing& tracing, Bill& bill, size_t start)
      : job_(job), tracing_(tracing), bill_(bill), flops_per_token_(model.flops_per_token()),
        bar_(job.options.schedule.steps, job.is_alone()) {
    if (job.is_first() && !job.options.out.empty()) log_.emplace(metrics_path(job.options.out), start);
  }

  // step: number of the step, counted from 1.
  void begin_step(size_t step) {
    Profiler::instance().enabled = job_.options.of<ReportOptions>().profile && steps_ >= unprofiled;
    Profiler::instance().context.step = int(step);
    if (steps_++ == 0) bill_.end_setup();
  }
  // Are collectives timed in this step? Each of them then costs the host more calls, and the device more events.
  bool times_collectives(size_t step) const {
    return steps_ <= 10 || step % 10 == 0 || tracing_.wanted() || job_.options.of<ReportOptions>().profile;
  }
  void end_step() { Profiler::instance().enabled = false; }

  // given: number of steps issued to the device so far; meets: the other ranks call this, too.
  void finished(const FinishedStep& step, size_t given, bool meets = true) {
    const StepResult& result = step.reported;
    const Options& o = job_.options;
    const bool printed = result.step % o.log_every == 0 || result.step == o.schedule.steps;
    shortest_ = std::min(shortest_, result.seconds);
    bar_.hide();
    bar_.add(result.loss);
    const std::optional<StepTraffic> traffic = traffic_of(step.traffic, printed && meets && step.meets);
    if (!traffic) waited_ = 0;  // one rank waits for nobody
    else waited_ = traffic->is_timed ? std::optional(traffic->exposed_milliseconds / 1e3) : std::nullopt;
    if (seconds_.size() < most_measured) seconds_.push_back(result.seconds);
    if (waited_ && exposed_.size() < most_measured) exposed_.push_back(*waited_);
    if (traffic && traffic->is_timed) {
      split_ = traffic->waits;
      split_.compute = std::max(0.0, result.seconds - step.data_seconds - split_.sum());
    }
    const StepTime time = divided(result.seconds, step.data_seconds, split_);
    if (result.applied) bill_.steps.add(time);
    else bill_.lost.left_out += time.sum();
    if (printed) print(result, traffic, seconds_left(given));
    log(metrics_of(result, time, traffic));
    if (tracing_.wanted()) tracing_.take();
  }

  // Prints the problem of a step. If it will be rolled back, rolled_back() logs it.
  void went_wrong(const StepResult& step, const std::string& reason, bool rolls_back) {
    const std::string incident = reason + (rolls_back ? "" : step.applied ? ": logged" : ": update left out");
    std::printf("step %5zu/%zu | %s", step.step, job_.options.schedule.steps, incident.c_str());
    if (step.loss_scale > 0) std::printf(", loss scale %g", step.loss_scale);
    std::printf("\n");
    if (!rolls_back) log({{"step", step.step}, {"incident", incident}});
  }
  // Removes the lines of the undone steps; the line of the rollback holds the bill, costs of these steps included.
  // seconds: of the steps that were dropped, and of loading the checkpoint
  void rolled_back(const Rollback& r, double seconds) {
    if (log_) bill_.add_rollback(metrics_path(job_.options.out), r.to, seconds), log_->go_back(r.to);
    std::printf("rolled back from step %zu to step %zu, and on without samples %zu to %zu\n", r.from, r.to,
                r.first_sample, r.last_sample);
    log({{"step", r.to},
         {"rolled_back_from", r.from},
         {"samples_left_out", {r.first_sample, r.last_sample}},
         {"reason", r.reason}});
  }
  void validated(size_t step, const ValidationLosses& losses) {
    nlohmann::ordered_json fields = {{"step", step}};
    std::printf("step %5zu/%zu", step, job_.options.schedule.steps);
    for (const auto& [key, loss] : losses) std::printf(" | %s %.4f", key.c_str(), loss), fields[key] = loss;
    std::printf("\n");
    log(std::move(fields));
  }
  void sampled(size_t step, const std::string& text) {
    std::printf("---\n");
    std::fwrite(text.data(), 1, text.size(), stdout);  // which may hold any byte
    std::printf("\n---\n");
    log({{"step", step}, {"sample", text}});
  }

  void show_progress(size_t step) { bar_.show(step, seconds_left(step)); }

  // Prints the summary of the run. step: number of steps done.
  void summarize(size_t step) {
    bar_.hide();
    tracing_.finish();
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    std::printf("%zu steps in %s; fastest step %.1f ms; peak host memory %s MiB\n", steps_,
                duration(seconds_since(begin_)).c_str(), shortest_ * 1e3,
                with_commas(double(usage.ru_maxrss) / 1024).c_str());
    const double tokens = double(step) * job_.options.tokens();
    bill_.print(tokens, tokens * flops_per_token_, peak_, seconds_left(step));
    if (job_.options.of<ReportOptions>().profile && steps_ > unprofiled) kernels_ = tracing_.print_profile_of(steps_ - unprofiled);
    else if (job_.options.of<ReportOptions>().profile) std::printf("profile   none: a start's first %zu steps are not measured\n", unprofiled);
    if (log_) log_->finish();
  }

  size_t steps() const { return steps_; }  // steps begun in this start

  // Seconds of the step that finished last in which its device only waited; none: they were not timed
  const std::optional<double>& waited() const { return waited_; }

  // The steps of this start. Kernels are known after summarize().
  MeasuredStep measured() const {
    if (seconds_.size() <= unprofiled) return {};
    const std::vector<double> seconds(seconds_.begin() + unprofiled, seconds_.end());
    MeasuredStep step = {median(seconds), median({exposed_.begin() + unprofiled, exposed_.end()}), kernels_};
    const double mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / double(seconds.size());
    for (KernelTotal& kernel : step.kernels) kernel.milliseconds *= step.seconds / mean;  // a few slow steps count less
    return step;
  }

 private:
  static constexpr size_t most_measured = 10'000;  // steps, so that a long run does not collect their times forever

  double seconds_left(size_t step) const {
    return seconds_since(begin_) / double(steps_) * double(job_.options.schedule.steps - step);
  }

  // The traffic of this rank in step `number`, and of every rank for a printed step. None if there is only one rank.
  std::optional<StepTraffic> traffic_of(int number, bool of_all_ranks) {
    if (job_.is_alone()) return {};
    StepTraffic mine;
    for (const auto& [group, traffic] : job_.mesh.take_traffic(number)) {
      mine.bytes[group] = traffic.bytes_sent;
      mine.is_timed = traffic.is_timed;
      mine.milliseconds += traffic.milliseconds;
      mine.exposed_milliseconds += traffic.exposed_milliseconds;
      // Besides the lanes, these are the groups in which all stages, or the first and the last, meet after the last
      // backward: stages that had theirs early wait for the others.
      const bool is_between_stages = job_.mesh.shape().pp > 1 && group != "data" && group != "tp" && group != "cp";
      (is_between_stages ? mine.waits.bubble : mine.waits.exposed[group]) += traffic.exposed_milliseconds / 1e3;
    }
    if (of_all_ranks) mine.of_ranks = job_.ranks.gather(object_of(mine).dump());
    return mine;
  }

  void print(const StepResult& s, const std::optional<StepTraffic>& traffic, double seconds_left) const {
    const double tokens = job_.options.tokens(), flops = tokens * flops_per_token_;
    std::printf("step %5zu/%zu | loss %.4f | norm %.3f | lr %.2e | %.1f ms | %s tokens/s | ", s.step,
                job_.options.schedule.steps, s.loss, s.norm, s.learning_rate, s.seconds * 1e3,
                with_commas(tokens / s.seconds).c_str());
    if (peak_ > 0) std::printf("MFU %.1f%% | ", 100 * flops / s.seconds / (peak_ * job_.ranks.size()));
    else std::printf("%.0f GFLOP/s | ", flops / s.seconds / 1e9);
    if (traffic && traffic->is_timed) std::printf("comm %.1f ms, %.1f exposed | ", traffic->milliseconds, traffic->exposed_milliseconds);
    std::printf("%s left\n", duration(seconds_left).c_str());
    std::fflush(stdout);
  }

  // traffic: none if there is only one rank
  nlohmann::ordered_json metrics_of(const StepResult& s, const StepTime& time,
                                    const std::optional<StepTraffic>& traffic) const {
    const double tokens = job_.options.tokens(), flops = tokens * flops_per_token_;
    nlohmann::ordered_json fields = {{"step", s.step},
                                     {"loss", s.loss},
                                     {"grad_norm", s.norm},
                                     {"lr", s.learning_rate},
                                     {"tokens", s.step * size_t(tokens)},
                                     {"step_ms", s.seconds * 1e3},
                                     {"tokens_per_s", tokens / s.seconds},
                                     {"flops_per_s", flops / s.seconds},
                                     {"mfu", peak_ > 0 ? flops / s.seconds / (peak_ * job_.ranks.size()) : NAN}};
    if (!s.applied) fields["left_out"] = true;
    if (s.loss_scale > 0) fields["loss_scale"] = s.loss_scale;
    if (s.of_islands == 1) fields["island"] = 0;
    if (s.of_islands > 1) fields["island"] = "mean";
    fields["time_ms"] = object_of(time);
    if (traffic) fields.update(object_of(*traffic));
    return fields;
  }

  void log(nlohmann::ordered_json fields) {
    if (!log_) return;
    bill_.add_to(fields);
    log_->append(fields);
  }

  Job& job_;
  Tracing& tracing_;
  Bill& bill_;
  double flops_per_token_, peak_ = peak_of(job_);
  std::optional<MetricsLog> log_;  // on rank 0, if there is a run folder
  ProgressBar bar_;
  Clock::time_point begin_ = Clock::now();
  size_t steps_ = 0;             // steps since this start, those that a rollback undid included
  std::vector<double> seconds_, exposed_;  // of steps; the part in which the device only waited
  std::vector<KernelTotal> kernels_;       // of a step, with --profile
  double shortest_ = INFINITY;   // seconds of the fastest step
  StepTime split_;               // of the last step whose collectives were timed
  std::optional<double> waited_;
};
