// --sample-every and --sample-seconds: texts in training.
#pragma once

#include "extensions/generation/generation.cuh"
#include "gpt/training_run.cuh"

class GenerationHook : public StepHook {
 public:
  using StepHook::StepHook;

  void before_model() override { sampler_.emplace(sampler_of(run_.o, run_.start.tokenizer())); }
  void rehearse() override { rehearse_text(run_.job, *run_.model, run_.batches.buffers(), *sampler_); }
  void begin() override { sampled_ = Clock::now(); }

  // Is a sample due? --sample-seconds goes by rank 0's clock; steps of --sample-every are known to all ranks.
  bool asks() override {
    const double seconds = run_.o.sample_seconds;
    return run_.job.is_first() && seconds > 0 && seconds_since(sampled_) >= seconds;
  }
  void finished(const FinishedStep& step) override { is_due_ |= step.asked; }
  bool looks_at_weights() const override { return (is_due_ && !run_.is_stopping) || run_.every(run_.o.sample_every); }
  void between_steps() override {
    if (!looks_at_weights()) return;
    try {
      run_.telemetry->sampled(run_.steps_done(), timed(run_.bill.lost.samples, [&] { return text(); }));
    } catch (const NotFinite& problem) {
      std::printf("no sample after step %zu: %s\n", run_.steps_done(), problem.what());
    }
    is_due_ = false;
    sampled_ = Clock::now();
  }

  double seconds_beside(double step) override {
    const Options& o = run_.o;
    const Clock::time_point start = Clock::now();
    text();
    const double seconds = seconds_since(start);
    return (o.sample_every ? seconds / double(o.sample_every) : 0) + (o.sample_seconds > 0 ? step * seconds / o.sample_seconds : 0);
  }

 private:
  std::string text() { return sampler_->text(run_.steps_done(), TokenByToken(*run_.model, run_.batches.buffers())); }

  std::optional<Sampler> sampler_;
  Clock::time_point sampled_;
  bool is_due_ = false;  // by --sample-seconds
};

inline std::unique_ptr<StepHook> generation_hook(TrainingRun& run) {
  return run.o.samples_in_training() ? std::make_unique<GenerationHook>(run) : nullptr;
}
