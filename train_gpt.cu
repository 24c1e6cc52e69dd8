// train_gpt: the recipe. train() sets a job up and runs the training loop; the files in training/ hold the details.
// `train_gpt --help` lists the options, README.md shows runs.
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "model.cuh"
#include "planner/goals.cuh"
#include "processes/agreement.h"
#include "processes/launch.h"
#include "runtime/interruption.h"
#include "runtime/process.h"
#include "runtime/run_folder.h"
#include "runtime/schedule.h"
#include "training/checkpoints.cuh"
#include "training/generation.cuh"
#include "training/rank_check.cuh"
#include "training/rehearsal.cuh"
#include "training/sync_check.cuh"
#include "training/telemetry.cuh"
#include "training/time_budget.cuh"

namespace {

// Runs work(). If it throws, this ends the job at once, after last(), which does what can still be done. The exception
// is caught here so that no destructor outside runs: destructors would wait for the device, and the device might wait
// forever for a rank that has ended.
template <class Work, class Last>
void end_job_on_error(Control& control, Work work, Last last) {
  const auto fail = [&](const std::exception& error, int exit_code) {
    try {
      last();
    } catch (const std::exception&) {  // the first error is the one to tell
    }
    control.fail(error.what(), exit_code);
  };
  try {
    work();
  } catch (const UsageError& error) {
    fail(error, 2);
  } catch (const std::filesystem::filesystem_error& error) {
    fail(std::runtime_error(excerpt(error.path1().native()) + ": " + error.code().message() + ": check this path"), 1);
  } catch (const std::exception& error) {
    fail(error, 1);
  }
}
template <class Work>
void end_job_on_error(Control& control, Work work) {
  end_job_on_error(control, work, [] {});
}

bool divides(size_t every, size_t step) { return every > 0 && step % every == 0; }

AdamW adamw_at(const Options& o, double learning_rate) {
  return {float(learning_rate), float(o.beta1), float(o.beta2), float(o.epsilon), float(o.weight_decay)};
}

// Trains, and returns the exit code.
int train(Job& job) {
  Options& o = job.options;
  Control& control = job.control;

  // ---- the data, and the checkpoint to start from. Nothing in the run folder is changed yet.
  Tracing tracing(job);
  const Datasets data = open_data(o);
  const RunStart start = {o.overwrite, o.resume, o.resume_from, o.init};
  std::optional<RunFolderLock> lock;  // from here on no other run writes to this folder
  if (job.is_first() && !o.out.empty()) lock.emplace(o.out);
  require_agreement(control, "data", {data.identity.train.text(), data.identity.val.text()}, "all ranks must see the same files");
  const std::optional<Checkpoint> checkpoint = choose_shared_checkpoint(o.out, start, job.ranks);
  CheckpointCopies copies(job.ranks, o.out);  // ranks that don't share rank 0's disk read its checkpoint from a copy
  const std::filesystem::path folder = checkpoint ? copies.folder_of(checkpoint->folder) : std::filesystem::path(o.init);

  // ---- the model, and the state that training changes
  if (o.check_ranks) check_ranks(o.dtype, control, job.mesh.world(), job.stream);
  const ModelShape shape = decide_shape(o, folder, checkpoint.has_value(), data);
  const PlannedDevice device = this_device(job.device);
  const std::unique_ptr<Model> model = build_model_to_train(o, shape, job.mesh, job.stream);
  Bill bill(o.price, control.size());  // what the run costs from here on; a resumed run adds its earlier costs below
  Batches batches(job, *model, data, bill);
  TrainingState state = {job, data, *model, copies, Guard(o.guard), {}};
  if (checkpoint) load_checkpoint(state, *checkpoint);
  else start_afresh(state);
  const std::filesystem::path tokenizer_folder = !folder.empty() ? folder : std::filesystem::path(o.out);
  std::optional<Sampler> sampler;
  if (o.samples_in_training()) sampler.emplace(sampler_of(o, shape, tokenizer_folder));
  end_job_on_error(control, [&] {
    rehearse(job, *model, batches.buffers(), sampler ? &*sampler : nullptr);
    if (o.train_minutes > 0 && !checkpoint) choose_steps(state, batches, sampler ? &*sampler : nullptr);
  });
  const Actions schedule = job.schedule();
  Guard& guard = state.guard;
  const size_t steps = o.schedule.steps;     // steps of the whole run
  const size_t& step = state.progress.step;  // steps done: the one that begins is number step + 1

  // ---- checkpoints. What may still fail comes before the run folder is changed.
  copies.release();  // the weights and the tokenizer have been read
  Checkpoints checkpoints(state, bill, checkpoint, tokenizer_folder);
  if (o.resume && !checkpoint) std::printf("--resume: no checkpoint in %s, starting afresh\n", o.out.c_str());
  if (step >= steps) {
    std::printf("finished: the checkpoint has %zu of %zu steps; a larger --steps goes on\n", step, steps);
    return 0;
  }
  const RankPlan own = allocated(*model, job.mesh, control.rank(), batches.buffers(), checkpoints.snapshot_bytes());
  std::optional<Plan> plan = gathered_plan(control, device, own);
  describe(job, *model, data, memory_text(*plan), step);
  print_batch_hint(o, planned_run(o, shape));
  if (const std::string hint = dtype_hint(job.device, o.dtype); !hint.empty() && !checkpoint) std::printf("%s\n", hint.c_str());

  // ---- the run folder, logs, signals
  job.ranks.all_gather("");  // wait until all ranks have read the run folder, before rank 0 changes it
  if (checkpoint && continues(o.out, start, checkpoint)) bill.restore(metrics_path(o.out), step);
  if (lock) claim_run_folder(o.out, start, checkpoint);
  checkpoints.describe();
  Telemetry telemetry(job, *model, tracing, bill, step);
  StepsInFlight in_flight(*model, job.mesh, o.dtype == "fp16");
  Interruption interruption(o.max_hours);
  bool stopping = false, sample_due = false;  // sample_due: by --sample-seconds
  Clock::time_point sampled = Clock::now();

  const auto validates = [&] { return data.validation && (step == steps || divides(o.val_every, step)); };
  const auto saves = [&] { return !o.out.empty() && (step == steps || stopping || divides(o.checkpoint_every, step)); };
  // How many steps may be in flight when the host goes on? One, unless the host needs the last step's result first.
  const auto most_in_flight = [&]() -> size_t {
    const bool needs_result = step == steps || stopping || tracing.wanted() || validates() || saves() ||
                              divides(o.check_sync, step) || sample_due || divides(o.sample_every, step);
    return needs_result ? 0 : 1;
  };

  // Waits for the oldest step in flight and looks at its result. Returns false if training went back to a checkpoint.
  const auto finish_step = [&] {
    const FinishedStep finished = in_flight.finish();
    telemetry.finished(finished, step);
    if (lock && plan) write_plan(o.out, *plan);  // a run that fails in its first step leaves nothing behind
    plan.reset();
    stopping |= finished.stop && step < steps;
    sample_due |= finished.sample;
    if (finished.saved) checkpoints.complete();
    const StepResult& result = finished.result;
    const Guard::Judgement judgement = guard.judge(result.loss, result.norm, result.applied, finished.limits);
    if (judgement.reason.empty()) return true;
    const bool rolls_back = judgement.action == Guard::Action::roll_back && checkpoints.can_roll_back();
    telemetry.went_wrong(result, judgement.reason, rolls_back);
    if (!rolls_back) return true;
    const Clock::time_point begin = Clock::now();
    in_flight.drop();
    telemetry.rolled_back(checkpoints.roll_back(result.step, judgement.reason), seconds_since(begin));
    return false;
  };

  const auto loop = [&] {
    while (step < steps && !stopping) {
      const double learning_rate = ::learning_rate(o.schedule, step);
      const bool one_under_way = in_flight.count() > 0;
      const StepLimits limits = guard.limits(one_under_way);
      // What the device itself refuses to apply. With --on-spike log that is only what is not finite.
      const StepLimits enforced = guard.prevents_updates() ? limits : StepLimits{};
      telemetry.begin_step(step + 1);
      // Zeroes the step's sums on the device, and puts this rank's votes beside the loss: was it asked to stop, has it
      // written its part of the checkpoint, and (rank 0 decides) are --sample-seconds over?
      const bool wants_sample = job.is_first() && o.sample_seconds > 0 && seconds_since(sampled) >= o.sample_seconds;
      in_flight.begin(interruption.asked(), checkpoints.is_written(), wants_sample);
      Batches::Samples samples = batches.of_step(state.progress);
      for (const Action& action : schedule) model->run(samples.batch(action));  // forward and backward, in this order
      model->update(adamw_at(o, learning_rate), float(o.grad_clip), enforced);
      ++state.progress.step;
      in_flight.end(step, learning_rate, limits);
      telemetry.end_step();

      bool rolled_back = false;
      while (in_flight.count() > most_in_flight() && !rolled_back) rolled_back = !finish_step();
      if (rolled_back) continue;
      if (divides(o.check_sync, step)) check_sync(control, model->store(), step, job.stream);
      if (saves() && job.is_first()) data.train->require_unchanged();
      if (saves()) checkpoints.save(step == steps || stopping);
      if (validates()) {
        const AddTime timer(bill.lost.evaluation);
        telemetry.validated(step, validation_loss(*model, batches, o.val_batches));
      }
      if ((sample_due && !stopping) || divides(o.sample_every, step)) {
        telemetry.sampled(sampler->text(step, TokenByToken(*model, batches.buffers())));
        sample_due = false;
        sampled = Clock::now();
      }
      telemetry.show_progress(step);
    }
  };
  // If the data turn out to be bad, the steps that were started before are still good, and are logged. No rank may be met
  // any more: the others may wait for this one's part of a step that it cannot start.
  const auto log_steps = [&] {
    while (in_flight.count() > 0 && in_flight.ends_within(10)) telemetry.finished(in_flight.finish(), step, false);
  };
  end_job_on_error(control, loop, log_steps);
  checkpoints.complete();
  telemetry.summarize(step);
  if (!stopping && !o.out.empty()) std::printf("%s", next_commands(o, control.size()).c_str());
  if (!stopping) return 0;
  std::printf("%s: stopped after step %zu%s\n", interruption.reason().c_str(), step,
              o.out.empty() ? "" : ", and saved: go on with --resume");
  return interrupted_exit_code;
}

// Prints texts sampled from the model of a checkpoint, the first one as it grows.
int generate(Job& job) {
  Options& o = job.options;
  Tracing tracing(job);
  const std::optional<Checkpoint> checkpoint = generating_checkpoint(job);
  const std::filesystem::path folder = checkpoint ? checkpoint->folder : std::filesystem::path(o.init);
  const ModelShape shape = loaded_shape(o, folder);
  check_shape(shape, o.seq_len);
  check_mesh(o, shape);
  o.micro_batch = o.samples;
  check_micro_batch(o);
  const std::unique_ptr<Model> model = build_model(o, shape, job.mesh, job.stream, false, o.samples);
  if (checkpoint) load_model_weights(*model, folder);
  else load_initial_weights(job, *model, folder);
  BatchBuffers buffers(round_up(o.samples * model->positions().length, o.tp), job.stream);
  const Sampler sampler = sampler_of(o, shape, folder);
  rehearse(job, *model, buffers, &sampler);
  const std::string speed = generate_texts(sampler, o.samples, size_t(o.seq_len), TokenByToken(*model, buffers));
  if (job.is_first() && !speed.empty()) std::fprintf(stderr, "%s\n", speed.c_str());  // stdout has the texts only
  tracing.finish();
  return 0;
}

// ---- the program around them

int run(const Options& options, Control& control, Mesh& mesh) {
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Job job = {options, control, mesh, rank_group(control, mesh.shape().tp), stream, device_name(mesh.device())};
  control.while_waiting([stream] { is_ready(stream); });
  Circle stage;  // whose ranks choose algorithms together
  if (const int stages = mesh.shape().pp; stages > 1) {
    stage = {"stage", mesh.stage_ranks()};
    gemm_choices().stage = "stage " + std::to_string(mesh.place().pp) + " of " + std::to_string(stages) + " ";
  }
  gemm_choices().agree = [&](const GemmChoices::Choose& choose) {
    return control.all_gather(stage, control.rank() == mesh.stage_ranks()[0] ? choose() : "")[0];
  };
  int code = 0;
  end_job_on_error(control, [&] { code = options.generate ? generate(job) : train(job); });
  control.while_waiting({});
  cudaStreamDestroy(stream);
  return code;
}

void check_pipeline(const Control& control) {
  if (const std::string problem = pipeline_problem(); !problem.empty()) usage_error("--pp: ", problem);
  if (const std::string advice = pipeline_advice(); control.rank() == 0 && !advice.empty()) print_error("--pp: " + advice);
}

int run_rank(int argc, char** argv, Control& control, FlightRecorder& recorder) {
  if (control.rank() > 0) std::freopen("/dev/null", "w", stdout);  // only rank 0 prints
  require_agreement(control, "program", program_checksum(), "start the same build on every host");
  try {
    require_agreement(control, "options", std::vector<std::string>(argv + 1, argv + argc), "give every rank the same");
  } catch (const std::exception& difference) {
    usage_error(difference.what());
  }
  std::optional<Options> options = parse_options(argc, argv);
  if (!options) return require_printed(), 0;
  if (!model_makers().contains(options->dtype))
    usage_error("--dtype ", options->dtype, ": this build leaves it out; make DTYPES=", options->dtype, " builds it");
  if (options->plan) {
    if (control.rank() == 0) options->has_goal() ? print_goals(*options) : print_plan(*options, control.size());
    return require_printed(), 0;
  }
  const int device = take_device(control, options->share_gpu);
  if (!options->mesh.empty()) end_job_on_error(control, [&] { choose_mesh(*options, control, device); });
  complete_options(*options, control.size());
  if (options->pp > 1) check_pipeline(control);
  control.watch(recorder, 15, options->collective_timeout);
  Mesh mesh(control, mesh_shape_of(*options, control.size()), device, recorder, options->cp_method == "ulysses");
  int code = 0;
  end_job_on_error(control, [&] { code = run(*options, control, mesh); });
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  prepare_process();
  FlightRecorder recorder;
  Control alone;
  std::unique_ptr<Control> control;
  end_job_on_error(alone, [&] {
    const Launch launch = find_launch();
    prepare_cuda(launch);
    control = start_control(launch);
  });
  int code = 0;
  end_job_on_error(*control, [&] {
    code = run_rank(argc, argv, *control, recorder);
    const uint64_t ending = recorder.enter("MPI_Finalize", 0);
    end_mpi();
    recorder.leave(ending);
    control->finish();
  });
  return code;
}
