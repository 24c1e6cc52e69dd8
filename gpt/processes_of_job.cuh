// What surrounds the recipe: a process starts, finds the other ranks and its device, does its work, and ends with all
// of them.
#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "gpt/base/process.h"
#include "gpt/command.h"
#include "gpt/device.cuh"
#include "gpt/end_job.cuh"
#include "gpt/job.cuh"
#include "gpt/launch.h"
#include "gpt/model.cuh"
#include "runtime/control/agreement.h"

inline int run_job(const Options& options, Control& control, Mesh& mesh, Hooks& hooks, Interruption& interruption, JobWork work) {
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Job job = {options, control, mesh, rank_group(control, mesh.shape().tp), stream, device_name(mesh.device()), hooks, interruption};
  control.while_waiting([stream] { is_ready(stream); });
  const int code = end_job_on_error(control, [&] { return work(job); });
  control.while_waiting([] {});
  cudaStreamDestroy(stream);
  return code;
}

inline void check_pipeline(const Control& control) {
  if (const std::string problem = pipeline_problem(); !problem.empty()) usage_error("--pp: ", problem);
  if (const std::string advice = pipeline_advice(); control.rank() == 0 && !advice.empty()) print_error("--pp: " + advice);
}

// How many neighbouring data-parallel ranks share a host, for --compress-where hosts; 1: that does not matter.
inline int ranks_inside(const Options& o, const Control& control) {
  if (o.compress_where != "hosts" || o.generate) return 1;
  const int tp = o.mesh.tp, N = o.mesh.cp * o.mesh.dp;
  int inside = 1;
  while (inside < N && control.host(inside * tp) == control.host(0)) ++inside;
  if (inside == N) usage_error("--compress-where hosts: all data-parallel ranks share ", control.host(0), ": leave compression out");
  for (int rank = 0; rank < o.mesh.ranks(); ++rank) {
    const int place = rank / tp % N, first = rank - place % inside * tp;  // the first of its host
    const bool ends_here = place % inside || place == 0 || control.host(rank) != control.host(rank - tp);
    if (N % inside || control.host(rank) != control.host(first) || !ends_here)
      usage_error("--compress-where hosts: rank ", rank, " is on ", control.host(rank), ", and hosts need ", inside, " neighbouring "
                  "data-parallel ranks each: choose other hosts, or leave it out");
  }
  return inside;
}

inline int run_rank(int argc, char** argv, Control& control, FlightRecorder& recorder, Hooks& hooks, Interruption& interruption,
                    JobWork train) {
  if (control.rank() > 0) std::freopen("/dev/null", "w", stdout);  // only rank 0 prints
  require_agreement(control, "program", {program_checksum()}, "start the same build on every host");
  const std::vector<std::string> words = split_private({argv + 1, argv + argc}).second;
  refuse(attempt([&] { require_agreement(control, "options", words, "give every rank the same"); }));
  std::optional<Options> options = parse_options(argc, argv);
  heeds_signals = options && !options->plan && !options->generate;
  if (!options) return require_printed(), 0;
  if (!model_makers().contains(options->dtype))
    usage_error("--dtype ", options->dtype, ": this build leaves it out; make DTYPES=", options->dtype, " builds it");
  if (is_done_without_devices(*options, control)) return require_printed(), 0;
  const int device = take_device(control, options->share_gpu);
  before_mesh(*options, control, device);
  complete_options(*options, control.size());
  if (options->mesh.pp > 1) check_pipeline(control);
  control.watch(recorder, 15, options->collective_timeout);
  Mesh mesh(control, options->mesh, device, recorder,
            {options->cp_method == "ulysses", options->sms, options->compressed_bits() > 0, ranks_inside(*options, control)});
  const JobWork command = command_of(*options);
  return end_job_on_error(control, [&] { return run_job(*options, control, mesh, hooks, interruption, command ? command : train); });
}

// On rank 0, before a machine's time is lost with anything that may fail. Mistakes in the options are named later.
inline void start_hooks(Hooks& hooks, int argc, char** argv) {
  hooks.fork_helper();
  attempt([&] {
    if (const std::optional<Options> options = parse_options(argc, argv); options && !options->plan) hooks.begin(options->out);
  });
}

// What a signal does before the run folder is changed. A rank that has not found the others yet is `quiet`: if one of them has
// failed, a launcher ends this one with a signal, and the line that names the cause is to be the only one.
inline auto end_before_training(Control& control, bool quiet) {
  return [&control, quiet](const std::string& signal) {
    control.fail(quiet ? "" : signal + ": stopped before the first step, and nothing was changed: start it again", interrupted_exit_code);
  };
}

// The whole of a process. train: what the job does, unless a room is asked for something else (gpt/command.h).
inline int run_program(int argc, char** argv, JobWork train) {
  prepare_process();
  FlightRecorder recorder;
  Hooks hooks(split_private({argv + 1, argv + argc}).first.of<HookOptions>());
  const auto at_exit = [&](int exit_code) { hooks.end("error", exit_code); };
  Interruption interruption;
  Control alone;
  const std::unique_ptr<Control> control = end_job_on_error(alone, [&] {
    alone.at_exit(at_exit, 0);
    const Launch launch = find_launch();
    if (launch.rank == 0 && hooks.are_wanted()) start_hooks(hooks, argc, argv);
    interruption.watch(end_before_training(alone, launch.size > 1));
    prepare_cuda(launch);
    return start_control(launch);
  });
  return end_job_on_error(*control, [&] {
    control->at_exit(at_exit, hooks.are_wanted() ? hooks.longest_wait("error") : 0);
    interruption.watch(end_before_training(*control, false));
    const int code = run_rank(argc, argv, *control, recorder, hooks, interruption, train);
    interruption.end_watch();
    hooks.end(code == 0 ? "done" : hooks.stop_reason, code);
    control->barrier(1e6);  // when another rank has ended with exit code 75, a launcher might end rank 0's upload
    const uint64_t ending = recorder.enter("MPI_Finalize", 0);
    end_mpi();
    recorder.leave(ending);
    control->finish();
    return code;
  });
}
