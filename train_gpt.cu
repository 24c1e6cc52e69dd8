// train_gpt: ranks, options, data, model, loop. `train_gpt --help` lists the options; README.md shows runs.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model.cuh"
#include "kernels/gemm_choices.cuh"
#include "kernels/tensor_log.cuh"
#include "parallel/agreement.h"
#include "parallel/launch.h"
#include "parallel/mesh.cuh"
#include "parallel/rank_check.cuh"
#include "parallel/sync_check.cuh"
#include "runtime/bill.h"
#include "runtime/checkpoint_writer.h"
#include "runtime/console.h"
#include "runtime/data.h"
#include "runtime/hardware.h"
#include "runtime/interruption.h"
#include "runtime/manifest.h"
#include "runtime/options.h"
#include "runtime/report.h"
#include "runtime/run_folder.h"
#include "runtime/sample.h"
#include "runtime/schedule.h"
#include "runtime/trainer_state.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// ---- before training

std::string device_name(const Mesh& mesh) {
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, mesh.device()));
  return properties.name;
}

// Only fp16 needs one.
LossScale loss_scale_of(const Options& o) {
  if (o.dtype != "fp16") return {};
  return {.value = float(o.loss_scale), .window = o.loss_scale_window};
}

State state_of(char kind) {
  return kind == 'w' ? State::weight : kind == 'm' ? State::first_moment : State::second_moment;
}

Recompute recompute_of(const std::string& name) {
  return name == "block" ? Recompute::block : name == "gelu" ? Recompute::gelu : Recompute::none;
}

// ---- the run

class Run {
 public:
  Run(Options options, Control& control, Mesh& mesh)
      : o_(std::move(options)), control_(control), mesh_(mesh), device_(device_name(mesh)),
        bill_(o_.price, control.size()), guard_(o_.guard) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    gemm_choices().agree = [this](const GemmChoices::Choose& choose) {
      return control_.all_gather(is_first() ? choose() : "")[0];
    };
    start_tracing();
  }
  ~Run() {
    writer_.reset();
    model_.reset();  // it works on the stream
    cudaStreamDestroy(stream_);
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  int generate() {
    const std::filesystem::path folder = weights_folder();
    const ModelShape shape = load_shape(folder);
    check_loaded_shape(o_, shape, folder);
    o_.seq_len = o_.seq_len ? o_.seq_len : shape.positions;
    check_shape(shape, o_.seq_len);
    o_.micro_batch = 1;
    build_model(shape, false);
    load_initial_weights(folder);
    print_sample(sampler(folder).text(0, next_logits()));
    return 0;
  }

  // The exit code.
  int train() {
    if (!o_.ceilings.empty()) ceilings_ = load_ceilings(o_.ceilings, o_.dtype, device_);
    open_data();
    const RunStart start = {o_.overwrite, o_.resume, o_.resume_from, o_.init};
    if (is_first() && std::filesystem::is_directory(o_.out)) lock_.emplace(o_.out);
    require_agreement(control_, "data", {data_.train.text(), data_.val.text()}, "all ranks must see the same files");
    const std::optional<Checkpoint> checkpoint = choose_valid_checkpoint(start);
    build_model(decide_shape(checkpoint), true);
    load_state(checkpoint);
    if (o_.train_minutes > 0 && !checkpoint) choose_steps();
    start_ = done_;
    tokenizer_folder_ = checkpoint ? checkpoint->folder.string() : !o_.init.empty() ? o_.init : o_.out;
    if (o_.sample_every) sampler_.emplace(sampler(tokenizer_folder_));
    if (o_.resume && !checkpoint) std::printf("--resume: no checkpoint in %s, starting afresh\n", o_.out.c_str());
    describe();
    report_.emplace(o_.schedule.steps, tokens_per_step(), tokens_per_step() * model_->flops_per_token(),
                    peak() * control_.size(),
                    o_.out.empty() || !is_first() ? std::filesystem::path() : metrics_path(o_.out), start_);
    if (o_.check_ranks) check_ranks(o_.dtype, control_, mesh_.dp(), stream_);
    if (start_ >= o_.schedule.steps) {
      std::printf("finished: the checkpoint has %zu of %zu steps\n", start_, o_.schedule.steps);
      return 0;
    }
    control_.barrier(checkpoint_patience);  // all have read what the run folder may hold
    if (checkpoint && continues(o_.out, start, checkpoint)) bill_.restore(metrics_path(o_.out), start_);
    if (!o_.out.empty() && is_first()) claim_run_folder(o_.out, start, checkpoint, lock_);
    const auto all_gather = [this](const std::string& mine) { return control_.all_gather(mine, checkpoint_patience); };
    const auto snapshot = [this](size_t floats) {
      auto memory = std::make_shared<HostMemory>(floats * sizeof(float), true);
      if (!memory->is_pinned())
        print_error("rank " + std::to_string(control_.rank()) + " (" + control_.host(control_.rank()) + ") has no " +
                    gibibytes(floats * sizeof(float)) + " of pinned memory: checkpoints go through pageable memory, slower");
      return std::shared_ptr<float[]>(memory, static_cast<float*>(memory->data()));
    };
    writer_.emplace(o_.out, size_t(o_.shard_size * 1e9), WritingRanks{control_.rank(), control_.size(), all_gather}, snapshot);
    if (o_.checkpoint_every) writer_->reserve(checkpoint_slices(model_->store().shards().slices_of_rank()));
    return loop();
  }

 private:
  static constexpr double checkpoint_patience = 10;  // disks may be slow
  static constexpr size_t unprofiled = 2;            // steps that allocate and choose algorithms

  bool is_first() const { return control_.rank() == 0; }

  // ---- what the options name

  std::filesystem::path weights_folder() const {
    if (!o_.init.empty()) return o_.init;
    const std::filesystem::path from = o_.resume_from.empty() ? o_.out : o_.resume_from;
    const std::optional<Checkpoint> found = find_checkpoint(from);
    if (!found) fail("--generate: ", from, " holds no checkpoint; name one with --resume DIR or --init DIR");
    return found->folder;
  }

  void open_data() {
    train_.emplace(o_.train);
    if (!o_.val.empty()) val_.emplace(o_.val);
    if (val_ && val_->is_text() != train_->is_text())
      usage_error("--train and --val: one is text, the other .bin shards; use one kind");
    data_ = {train_->identity(), val_ ? val_->identity() : DataIdentity()};
  }

  ModelShape decide_shape(const std::optional<Checkpoint>& checkpoint) {
    const std::filesystem::path folder = checkpoint ? checkpoint->folder : std::filesystem::path(o_.init);
    ModelShape shape;
    if (folder.empty()) {
      shape = shape_of(o_, train_->default_vocabulary());
    } else {
      shape = load_shape(folder);
      check_loaded_shape(o_, shape, folder);
      if (o_.seq_len == 0) o_.seq_len = shape.positions;
      if (!checkpoint && train_->is_text()) check_tokens_are_bytes(folder, shape.vocabulary);
    }
    check_shape(shape, o_.seq_len);
    check_micro_batch(o_);
    check_enough(*train_, "--train", size_t(o_.global_batch));
    if (!val_) return shape;
    const size_t validated_on = o_.val_batches * size_t(o_.global_batch);
    check_enough(*val_, "--val", validated_on);
    val_->check_tokens(validated_on, o_.seq_len, shape.vocabulary);
    return shape;
  }

  void check_enough(const TokenData& data, const char* option, size_t samples) const {
    if (data.samples(o_.seq_len) < samples)
      fail(option, ": ", data.tokens(), " tokens hold ", data.samples(o_.seq_len), " samples of ", o_.seq_len, ", and ",
           samples, " are needed: give more data, or lower --seq-len, --global-batch or --val-batches");
  }

  int logit_chunks() const {
    const int rows = o_.micro_batch * o_.seq_len;
    return std::min(o_.logit_chunks ? o_.logit_chunks : ceil_div(rows, 16384), rows);
  }

  void build_model(const ModelShape& shape, bool training) {
    const bool cudnn = o_.attention == "cudnn" || (o_.attention == "auto" && training);
    model_ = make_model(o_.dtype,
                        {.shape = shape,
                         .micro_batch = o_.micro_batch,
                         .seq_len = o_.seq_len,
                         .recompute = recompute_of(o_.recompute),
                         .logit_chunks = logit_chunks(),
                         .library_attention = cudnn,
                         .store = {.stage = o_.zero,
                                   .training = training,
                                   .stochastic_rounding = o_.stochastic_rounding,
                                   .loss_scale = loss_scale_of(o_),
                                   .reduce_narrow = o_.reduce_dtype == "bf16",
                                   .seed = o_.seed}},
                        mesh_.dp(), stream_);
    if (o_.attention == "cudnn" && !model_->attention_problem().empty())
      usage_error("--attention cudnn: ", model_->attention_problem(), "; leave the option out");
  }

  // ---- state

  // The newest checkpoint that is whole. Those that are passed over are set aside when the run folder is claimed.
  std::optional<Checkpoint> choose_valid_checkpoint(const RunStart& start) {
    std::optional<Checkpoint> found = choose_checkpoint(o_.out, start);
    require_agreement(control_, "checkpoint", found ? found->folder.string() : "none",
                      "all ranks must see the same files: use a file system that they share, or a copy on each host");
    if (found) found = whole_checkpoint(*found, start, [this](const auto& folder) { return damage_anywhere(folder); });
    return found;
  }

  // Ranks share the work.
  std::string damage_anywhere(const std::filesystem::path& folder) {
    for (const std::string& damage : control_.all_gather(damage_of(folder, size_t(control_.rank()), size_t(control_.size()))))
      if (!damage.empty()) return damage;
    return "";
  }

  CopyIn copy_in() {
    return [this](const CheckpointSlice& slice, char kind, const std::vector<float>& values) {
      model_->store().copy_in(stored_slice(model_->tensors(), slice), state_of(kind), values);
    };
  }

  // From a checkpoint, or from anyone's folder.
  void load_initial_weights(const std::filesystem::path& folder) {
    const std::string damage = has_manifest(folder) ? damage_anywhere(folder) : "";
    if (!damage.empty()) fail("--init ", damage, ": name another folder (without manifest_* files this is not checked)");
    load_model_weights(folder);
  }

  void load_model_weights(const std::filesystem::path& folder) {
    load_weights(folder, model_->tensors().shape(), stored_tensors(model_->tensors()),
                 checkpoint_slices(model_->store().own_slices()), copy_in());
  }

  void load_state(const std::optional<Checkpoint>& checkpoint) {
    if (!checkpoint) {
      if (o_.init.empty()) model_->store().initialize();
      else load_initial_weights(o_.init);
      return;
    }
    const TrainerState trainer =
        load_trainer_state(checkpoint->folder, loss_scale_of(o_), guard_, o_, data_);
    if (o_.train_minutes > 0) o_.schedule.steps = trainer.steps;
    load_model_weights(checkpoint->folder);
    load_optimizer(checkpoint->folder, stored_tensors(model_->tensors()),
                   checkpoint_slices(model_->store().own_slices()), copy_in());
    saved_ = checkpoint;
    done_ = checkpoint->step;
    samples_left_out_ = trainer.samples - done_ * size_t(o_.global_batch);
    model_->store().set_progress(done_ - guard_.left_out(), trainer.loss_scale);
    for (const auto& [product, choice] : trainer.algorithms) gemm_choices().known.try_emplace(product, choice);
  }

  // --train-minutes: as many steps as fit, by a few that are measured and undone. Rank 0's clock decides for all.
  void choose_steps() {
    const Clock::time_point begin = Clock::now();
    std::vector<double> seconds;
    for (size_t step = 0; step < unprofiled + 5; ++step) {
      const Clock::time_point start = Clock::now();
      start_step(false, false);
      model_->results(in_flight_.back().number);
      if (step >= unprofiled) seconds.push_back(seconds_since(start));
    }
    std::nth_element(seconds.begin(), seconds.begin() + 2, seconds.end());
    double validation = 0;
    for (int time = 0; val_ && time < 2; ++time) {  // the first one chooses algorithms
      const Clock::time_point start = Clock::now();
      accumulate(*val_, 0, false, false);
      model_->sums();
      validation = double(o_.val_batches) * seconds_since(start);
    }
    in_flight_.clear();
    done_ = 0;
    Profiler::instance().take_trace();
    model_->store().clear();
    load_state({});
    const size_t steps = steps_within(60 * o_.train_minutes - seconds_since(begin), seconds[2], validation, o_.val_every);
    o_.schedule.steps = std::stoull(control_.all_gather(std::to_string(steps))[0]);
    try {
      validate(o_.schedule);
    } catch (const std::exception& error) {
      usage_error("--train-minutes ", o_.train_minutes, " is ", o_.schedule.steps, " steps here: ", error.what());
    }
  }

  // Takes a snapshot, which is written while training goes on. Disks may fail: the run can do without a checkpoint that
  // is not its last.
  void save() {
    complete_checkpoint();
    const Clock::time_point begin = Clock::now();
    CopyOut copy_out = [this](const CheckpointSlice& slice, char kind, float* to) {
      model_->store().copy_out(stored_slice(model_->tensors(), slice), state_of(kind), to);
    };
    const TrainerState state = {first_sample(done_), o_.schedule.steps, model_->gradient_summary().scale, gemm_choices().known};
    const std::string problem =
        writer_->begin(done_, {.shape = model_->tensors().shape(),
                               .tensors = stored_tensors(model_->tensors()),
                               .slices = checkpoint_slices(model_->store().shards().slices_of_rank()),
                               .copy_out = copy_out,
                               .trainer = trainer_text(state, guard_, o_, data_),
                               .tokenizer_folder = tokenizer_folder_,
                               .wait = [this] { CUDA_CHECK(cudaStreamSynchronize(stream_)); }});
    if (!problem.empty()) report_unsaved(problem);
    bill_.lost.checkpoints += seconds_since(begin);
  }

  // Waits until the checkpoint under way, if any, has got its name.
  void complete_checkpoint() {
    if (!writer_->under_way()) return;
    const Clock::time_point begin = Clock::now();
    const std::string problem = writer_->complete();
    if (problem.empty()) {
      saved_ = Checkpoint{writer_->step(), o_.out / std::filesystem::path(checkpoint_name(writer_->step()))};
      tokenizer_folder_ = saved_->folder;  // the one before may be pruned
      writer_->prune(o_.keep, o_.keep_every);
    } else {
      report_unsaved(problem);
    }
    bill_.lost.checkpoints += seconds_since(begin);
  }

  void report_unsaved(const std::string& problem) {
    if ((is_last() && in_flight_.empty()) || stopping_) fail(problem);
    if (is_first()) print_error("the checkpoint of step " + std::to_string(writer_->step()) +
                                " could not be written, training goes on: " + one_line(problem));
  }

  // Of the training data, in the step after `done` steps.
  size_t first_sample(size_t done) const { return done * size_t(o_.global_batch) + samples_left_out_; }

  // ---- what is printed

  std::string attention_body() const {
    if (o_.attention != "own" && model_->attention_problem().empty()) return model_->library_attention();
    return "own kernels" + (o_.attention == "own" ? "" : ": " + model_->attention_problem());
  }

  void describe() const {
    const ModelShape& s = model_->tensors().shape();
    std::printf("model     %d layers, %d heads, %d channels, vocabulary %d, %d positions: %s parameters, %s%s\n", s.layers,
                s.heads, s.channels, s.vocabulary, s.positions, with_commas(double(model_->tensors().parameters())).c_str(),
                o_.dtype.c_str(), o_.stochastic_rounding ? " with stochastic rounding" : "");
    std::printf("device    %s\n", device_.c_str());
    if (!model_->library_attention().empty()) std::printf("attention %s\n", attention_body().c_str());
    if (control_.size() > 1)
      std::printf("mesh      data parallel %d, ZeRO %d, gradients travel in %s\n", mesh_.shape().dp, o_.zero,
                  o_.reduce_dtype.c_str());
    std::printf("data      %s tokens in %zu files (%s): %zu samples of %d", with_commas(double(train_->tokens())).c_str(),
                train_->files(), train_->is_text() ? "text, a byte is a token" : "token shards",
                train_->samples(o_.seq_len), o_.seq_len);
    if (val_) std::printf("; validation on %zu", o_.val_batches * size_t(o_.global_batch));
    std::printf("\nbatch     %d samples in micro-batches of %d: %s tokens a step\n", o_.global_batch, o_.micro_batch,
                with_commas(tokens_per_step()).c_str());
    std::printf("memory    ");
    for (const auto& category : model_->memory().categories())
      std::printf("%s %s, ", category.name.c_str(), gibibytes(category.bytes).c_str());
    std::printf("total %s\n", gibibytes(model_->memory().total()).c_str());
    std::printf("work      6N + 6LCT = %.3f GFLOP a token", model_->flops_per_token() / 1e9);
    if (peak() > 0) std::printf("; MFU against %.0f TFLOP/s (dense %s)", peak() / 1e12, o_.dtype.c_str());
    std::printf("\nsteps     %zu to %zu", start_ + 1, o_.schedule.steps);
    if (o_.train_minutes > 0) std::printf(" (%g minutes)", o_.train_minutes);
    std::printf(", learning rate %g (%s), output %s\n", o_.schedule.lr, o_.schedule.kind.c_str(),
                o_.out.empty() ? "none" : o_.out.c_str());
    std::fflush(stdout);
  }

  // ---- the loop

  // Until all steps are done or somebody asks to stop; the exit code.
  int loop() {
    Interruption interruption(o_.max_hours);
    ProgressBar bar(o_.schedule.steps, control_.size() == 1);
    const Clock::time_point begin = Clock::now();
    size_t steps = 0;  // of this run, those that a rollback undid included
    while (done_ < o_.schedule.steps && !stopping_) {
      try {
        start_step(interruption.asked(), o_.profile && steps >= unprofiled);
      } catch (...) {  // bad data: the steps before are good
        while (!in_flight_.empty()) finish_step(0);
        throw;
      }
      ++steps;
      bar.hide();
      const auto left = [&] { return seconds_since(begin) / double(steps) * double(o_.schedule.steps - done_); };
      bool undone = in_flight_.size() > 1 && !finish_step(left());
      while (!undone && is_due() && !in_flight_.empty()) undone = !finish_step(left());
      if (!undone && is_due()) after_step();
      bar.show(done_, left());
    }
    complete_checkpoint();
    bar.hide();
    save_trace();
    report_->print_summary(steps, shortest_, seconds_since(begin));
    const double tokens = double(done_) * tokens_per_step();
    bill_.print(tokens, tokens * model_->flops_per_token(), peak(),
                seconds_since(begin) / double(steps) * double(o_.schedule.steps - done_));
    if (o_.profile && steps > unprofiled) print_profile(kernel_totals(), steps - unprofiled, ceilings_);
    if (!stopping_) return 0;
    std::printf("%s: stopped after step %zu%s\n", interruption.reason().c_str(), done_,
                o_.out.empty() ? "" : ", and saved: go on with --resume");
    return interrupted_exit_code;
  }

  static std::vector<KernelTotal> kernel_totals() {
    std::vector<KernelTotal> totals;
    for (const auto& [name, total] : Profiler::instance().collect())
      totals.push_back({name, size_t(total.calls), total.milliseconds, total.bytes, total.flops});
    return totals;
  }

  // A step that the device was given.
  struct Started {
    int number, traffic;  // the model's and the communicator's
    size_t step;
    double rate;
    SpikeLimits limits;
  };

  // Gives the device all of the next step, and waits for nothing.
  void start_step(bool asked_to_stop, bool profiled) {
    Profiler::instance().enabled = profiled;
    Profiler::instance().context.step = int(done_ + 1);
    const double rate = learning_rate(o_.schedule, done_);
    const SpikeLimits limits = guard_.limits(!in_flight_.empty()), none;
    const bool saved = writer_ && writer_->under_way() && writer_->is_written();
    const int traffic = mesh_.dp().begin_traffic();
    const int number = model_->begin_step({.stop = asked_to_stop ? 1.0f : 0.0f, .saved = saved ? 1.0f : 0.0f});
    accumulate(*train_, first_sample(done_), o_.shuffle, true);
    const SpikeLimits& applied = guard_.prevents_updates() ? limits : none;
    model_->update({float(rate), float(o_.beta1), float(o_.beta2), float(o_.epsilon), float(o_.weight_decay)},
                   float(o_.grad_clip), {applied.loss, applied.norm});
    model_->end_step();
    Profiler::instance().enabled = false;
    mesh_.dp().begin_traffic();  // what comes next is of no step
    in_flight_.push_back({number, traffic, ++done_, rate, limits});
  }

  // Waits for the oldest step under way. False: it is undone, and what came after it, too.
  bool finish_step(double seconds_left) {
    const Started started = in_flight_.front();
    in_flight_.pop_front();
    const StepResults results = model_->results(started.number);
    const auto& [sums, gradients, seconds] = results;
    const double loss_scale = o_.dtype == "fp16" ? gradients.scale.value : 0;
    const StepResult step = {started.step, sums.loss, gradients.norm, started.rate, seconds, gradients.factor >= 0, loss_scale};
    shortest_ = std::min(shortest_, seconds);
    report(step, started, seconds_left);
    stopping_ |= sums.stop > 0 && done_ < o_.schedule.steps;
    if (sums.saved == float(control_.size())) complete_checkpoint();
    return guarded_step(step, started.limits);
  }

  void report(const StepResult& step, const Started& started, double seconds_left) {
    const bool printed = step.step % o_.log_every == 0 || step.step == o_.schedule.steps;
    report_->step(step, traffic_of(started.traffic, printed), bill_, printed, seconds_left);
    trace_step();
  }

  // What the guard thinks of the step. False: it is undone.
  bool guarded_step(const StepResult& step, const SpikeLimits& limits) {
    const Guard::Judgement judgement = guard_.judge(step.loss, step.norm, step.applied, limits);
    if (judgement.reason.empty()) return true;
    const bool rolls_back = judgement.action == Guard::Action::roll_back && saved_;
    report_->print_incident(step, judgement.reason, rolls_back ? "" : step.applied ? ": logged" : ": update left out");
    if (rolls_back) roll_back(step.step, judgement.reason);
    return !rolls_back;
  }

  // To the newest checkpoint, and on with the samples that follow step `from`.
  void roll_back(size_t from, const std::string& reason) {
    complete_checkpoint();
    guard_.count_rollback();
    const size_t next_sample = first_sample(from);
    CUDA_CHECK(cudaStreamSynchronize(stream_));  // the step that had begun is of no use
    in_flight_.clear();
    load_state(saved_);
    samples_left_out_ = next_sample - done_ * size_t(o_.global_batch);
    report_->rollback(done_, from, reason);
  }

  static bool divides(size_t every, size_t step) { return every > 0 && step % every == 0; }
  bool is_last() const { return done_ == o_.schedule.steps; }
  bool validation_is_due() const { return val_ && (is_last() || divides(o_.val_every, done_)); }
  bool checkpoint_is_due() const {
    return !o_.out.empty() && (is_last() || stopping_ || divides(o_.checkpoint_every, done_));
  }
  bool traces() const { return !o_.trace.empty() || tensor_log_; }

  // Is there anything to do before the next step can start?
  bool is_due() const {
    return is_last() || stopping_ || traces() || validation_is_due() || checkpoint_is_due() ||
           divides(o_.check_sync, done_) || divides(o_.sample_every, done_);
  }

  void after_step() {
    if (divides(o_.check_sync, done_)) check_sync(control_, model_->store(), done_, stream_);
    if (validation_is_due()) validate_now(done_);
    if (divides(o_.sample_every, done_)) {
      std::printf("---\n");
      print_sample(sampler_->text(done_, next_logits()));
      std::printf("---\n");
    }
    if (checkpoint_is_due()) save();
  }

  // One global batch from sample number `first` on: gradients and loss, or the loss alone.
  void accumulate(const TokenData& data, size_t first, bool shuffle, bool training) {
    const SampleOrder order(data.samples(o_.seq_len), shuffle, o_.seed);
    const size_t micro_batch = size_t(o_.micro_batch), seq_len = size_t(o_.seq_len);
    std::vector<int> inputs(micro_batch * seq_len), targets(micro_batch * seq_len);
    const size_t ranks = size_t(mesh_.shape().dp), micro_steps = size_t(o_.global_batch) / (micro_batch * ranks);
    for (size_t a = 0; a < micro_steps; ++a) {
      const size_t number = a * ranks + size_t(mesh_.place().dp);  // of the micro-batch in the step
      const Clock::time_point begin = Clock::now();
      for (size_t b = 0; b < micro_batch; ++b)
        data.read_sample(order(first + number * micro_batch + b), o_.seq_len, model_->tensors().shape().vocabulary,
                         &inputs[b * seq_len], &targets[b * seq_len]);
      if (training && model_->is_idle()) bill_.lost.data += seconds_since(begin);
      Profiler::instance().context.micro_batch = int(number);
      if (training) model_->train_micro_step(inputs.data(), targets.data(), tokens_per_step(), a == 0, a + 1 == micro_steps);
      else model_->evaluate_micro_step(inputs.data(), targets.data(), tokens_per_step(), a == 0, a + 1 == micro_steps);
    }
    Profiler::instance().context.micro_batch = -1;
  }

  void validate_now(size_t step) {
    const Clock::time_point begin = Clock::now();
    double sum = 0;
    for (size_t batch = 0; batch < o_.val_batches; ++batch) {
      accumulate(*val_, batch * size_t(o_.global_batch), false, false);
      sum += model_->loss();
    }
    const double loss = sum / double(o_.val_batches);
    bill_.lost.evaluation += seconds_since(begin);
    report_->validation(step, loss);
  }

  // ---- what tracing and the ranks tell

  void start_tracing() {
    Profiler& profiler = Profiler::instance();
    profiler.rank = control_.rank();
    profiler.trace = !o_.trace.empty();
    profiler.origin = std::stoll(control_.all_gather(std::to_string(wall_clock()))[0]);
    profiler.name_stream(stream_, "compute");
    if (!o_.trace_tensors.empty())
      tensor_log_.emplace(o_.trace_tensors, TensorLogRank{control_.rank(), control_.size(), mesh_.shape().dp, o_.micro_batch});
  }

  void trace_step() {
    if (!o_.trace.empty()) timeline_.push_back(Profiler::instance().take_trace());
    if (tensor_log_) tensor_log_->flush();
    Profiler::instance().context.step = -1;
  }

  // All ranks' timelines in one file.
  void save_trace() {
    if (o_.trace.empty()) return;
    trace_step();  // what came after the last step
    std::string mine;
    for (const std::string& part : timeline_)
      if (!part.empty()) mine += (mine.empty() ? "" : ",\n") + part;
    const std::vector<std::string> all = control_.gather(mine);
    if (is_first()) write_trace(o_.trace, all);
  }

  // This rank's, and at the steps that are printed every rank's; none if it is alone.
  std::optional<StepTraffic> traffic_of(int number, bool of_all_ranks) {
    if (control_.size() == 1) return {};
    const Traffic traffic = mesh_.dp().take_traffic(number);
    StepTraffic mine = {traffic.bytes_sent, traffic.milliseconds, traffic.exposed_milliseconds, {}};
    if (of_all_ranks) mine.of_ranks = control_.gather(text_of(mine));
    return mine;
  }

  Sampler sampler(const std::filesystem::path& folder_of_tokenizer) const {
    return {Tokenizer(model_->tensors().shape().vocabulary, folder_of_tokenizer), o_.prompt, o_.sample_len,
            {o_.temperature, o_.top_k}, o_.seed};
  }

  NextLogits next_logits() {
    return [this](const std::vector<int>& tokens) {
      const size_t visible = std::min(tokens.size(), size_t(o_.seq_len));
      return model_->next_token_logits({tokens.end() - long(visible), tokens.end()});
    };
  }

  double peak() const { return peak_flops(device_, o_.dtype == "fp32"); }  // FLOP/s; 0: not known
  double tokens_per_step() const { return double(o_.global_batch) * o_.seq_len; }

  Options o_;
  Control& control_;
  Mesh& mesh_;
  std::string device_;
  cudaStream_t stream_ = nullptr;
  std::optional<TokenData> train_, val_;
  RunData data_;  // what they hold
  std::unique_ptr<Model> model_;
  std::optional<Report> report_;
  std::optional<Ceilings> ceilings_;  // of this device, for --profile
  std::optional<TensorLog> tensor_log_;
  std::vector<std::string> timeline_;  // of the steps, for --trace
  std::optional<Sampler> sampler_;
  std::filesystem::path tokenizer_folder_;  // where vocab.json and merges.txt may be
  std::optional<RunFolderLock> lock_;
  std::optional<CheckpointWriter> writer_;
  std::optional<Checkpoint> saved_;  // the newest of this run
  Bill bill_;
  bool stopping_ = false;            // before the last step
  Guard guard_;
  size_t start_ = 0, done_ = 0;  // steps done before this run, and now; those under way included
  std::deque<Started> in_flight_;
  double shortest_ = INFINITY;   // seconds of a step
  size_t samples_left_out_ = 0;  // by rollbacks
};

// An error ends the job where it is caught: destructors would wait for ranks that are not coming any more.
template <class Work>
void guarded(Control& control, Work work) {
  try {
    work();
  } catch (const UsageError& error) {
    control.fail(error.what(), 2);
  } catch (const std::exception& error) {
    control.fail(error.what());
  }
}

int run(const Options& options, Control& control, Mesh& mesh) {
  Run run(options, control, mesh);
  int code = 0;
  guarded(control, [&] { code = options.generate ? run.generate() : run.train(); });
  return code;
}

int run_rank(int argc, char** argv, Control& control, FlightRecorder& recorder) {
  if (control.rank() > 0) std::freopen("/dev/null", "w", stdout);  // rank 0 alone speaks
  require_agreement(control, "program", program_checksum(), "start the same build on every host");
  require_agreement(control, "options", std::vector<std::string>(argv + 1, argv + argc), "give every rank the same");
  std::optional<Options> options = parse_options(argc, argv);
  if (!options) return 0;
  if (!model_makers().contains(options->dtype))
    usage_error("--dtype ", options->dtype, ": this build leaves it out; make DTYPES=", options->dtype, " builds it");
  complete_options(*options, control.size());
  control.watch(recorder, 15, options->collective_timeout);
  Mesh mesh(control, {.dp = control.size()}, options->share_gpu, recorder);
  int code = 0;
  guarded(control, [&] { code = run(*options, control, mesh); });
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error of write(), which says what and where
  FlightRecorder recorder;
  Control alone;
  std::unique_ptr<Control> control;
  guarded(alone, [&] { control = start_control(find_launch()); });
  int code = 0;
  guarded(*control, [&] {
    code = run_rank(argc, argv, *control, recorder);
    const uint64_t ending = recorder.enter("MPI_Finalize", 0);
    end_mpi();
    recorder.leave(ending);
    control->finish();
  });
  return code;
}
