// train_gpt: the recipe. Trainer (gpt/trainer.cuh) has what a run consists of, gpt/processes_of_job.cuh what starts and
// ends processes. `train_gpt --help` lists the options, README.md shows runs.
#include "extensions/generation/generation.cuh"
#include "gpt/processes_of_job.cuh"
#include "gpt/trainer.cuh"

namespace {

// Trains, and returns the exit code.
int train(Job& job) {
  const Options& o = job.options;
  Trainer t(job);  // data, model, state and checkpoints
  if (t.is_finished()) {
    std::printf("finished: %s\n", t.how_finished().c_str());
    return 0;
  }
  t.begin();
  end_job_on_error(job.control, [&] {
    while (!t.done()) {
      if (!t.step()) continue;  // it went back to a checkpoint
      if (t.every(o.check_sync)) t.check_sync();
      if (t.validates()) t.validate();
      if (t.saves()) t.save();
      if (t.samples()) t.sample();
      t.show_progress();
    }
  }, [&] { t.log_started_steps(); });
  return t.finish();
}

// Prints texts sampled from the model of a checkpoint, the first one as it grows.
int generate(Job& job) {
  Options& o = job.options;
  Tracing tracing(job);
  const std::optional<Checkpoint> checkpoint = generating_checkpoint(job);
  if (!checkpoint && !o.merge.empty()) usage_error("--merge: name the run whose adapters it takes with --resume");
  const std::filesystem::path folder = checkpoint ? checkpoint->folder : std::filesystem::path(o.init);
  const std::filesystem::path base = folder_of_model(o, folder, checkpoint.has_value());
  o.shape = loaded_shape(o, base);
  o.micro_batch = o.samples;
  refuse(shape_problem(o));
  decide_attention(o, {});
  const std::unique_ptr<Model> model = build_model(o, job.mesh, job.stream, false, o.samples);
  if (checkpoint) load_weights(folder, model->store());
  if (!checkpoint || model->frozen()) load_initial_weights(job, *model, o.init);
  if (!o.merge.empty()) {
    model->merge_adapters();
    write_model(*model->frozen(), base, o.merge);
    std::printf("%s: the model with the adapters of %s, in fp32\n", o.merge.c_str(), folder.c_str());
    return 0;
  }
  BatchBuffers buffers(round_up(o.samples * model->positions().length, o.mesh.tp), job.stream);
  const Sampler sampler = sampler_of(o, base);
  rehearse(job, *model, buffers, &sampler);
  const std::string speed = generate_texts(sampler, o.samples, size_t(o.seq_len), TokenByToken(*model, buffers));
  if (job.is_first() && !speed.empty()) std::fprintf(stderr, "%s\n", speed.c_str());  // stdout has the texts only
  tracing.finish();
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return run_program(argc, argv, train, generate); }
