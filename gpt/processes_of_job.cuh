// Everything around the recipe: a process starts, finds the other ranks and its device, does its work, and ends with all
// of them.
#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "gpt/agreement.h"
#include "gpt/base/process.h"
#include "gpt/command.h"
#include "gpt/device.cuh"
#include "gpt/end_job.cuh"
#include "gpt/job.cuh"
#include "gpt/launch.h"
#include "gpt/model.cuh"
#include "gpt/process_hook.h"
#include "gpt/ranks.h"

inline int run_rank(int argc, char** argv, Ranks& ranks, const ProcessHooks& hooks, Interruption& interruption, JobWork train) {
  if (ranks.rank() > 0) std::freopen("/dev/null", "w", stdout);  // only rank 0 prints
  require_agreement(ranks, "program", {program_checksum()}, "start the same build on every host");
  const std::vector<std::string> words = split_private({argv + 1, argv + argc}).second;
  refuse(attempt([&] { require_agreement(ranks, "options", words, "give every rank the same"); }));
  std::optional<Options> options = parse_options(argc, argv);
  heeds_signals = options && !options->plan && !options->generate;
  if (!options) return require_printed(), 0;
  if (!model_makers().contains(options->dtype))
    usage_error("--dtype ", options->dtype, ": this build leaves it out; make DTYPES=", options->dtype, " builds it");
  if (is_done_without_devices(*options, ranks)) return require_printed(), 0;
  const int device = take_device(ranks, options->share_gpu);
  before_mesh(*options, ranks, device);
  complete_options(*options, ranks.size());
  before_groups(*options, ranks);
  Mesh mesh(ranks, options->mesh, device, {options->cp_method == "ulysses", options->sms, options->compressed_bits() > 0, options->ranks_inside()});
  return end_job_on_error(ranks, [&] {
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Job job = {*options, ranks, mesh, stream, device_name(device), hooks, interruption};
    ranks.meanwhile([stream] { is_ready(stream); });
    const JobWork command = command_of(*options);
    const int code = command ? command(job) : train(job);
    ranks.meanwhile([] {});
    cudaStreamDestroy(stream);
    return code;
  });
}

// The effect of a signal before the run folder is changed. A rank that has not found the others yet is `quiet`: if one of them
// has failed, a launcher ends this one with a signal, and the line that names the cause is to be the only one.
inline auto end_before_training(Ranks& ranks, bool quiet) {
  return [&ranks, quiet](const std::string& signal) {
    ranks.fail(quiet ? "" : signal + ": stopped before the first step, and nothing was changed: start it again", interrupted_exit_code);
  };
}

// The whole of a process. train: the work of the job, unless a room is asked for other work (gpt/command.h).
inline int run_program(int argc, char** argv, JobWork train) {
  prepare_process();
  const ProcessHooks hooks = process_hooks(argc, argv);
  const auto end_hooks = [&](const char* reason, int exit_code) { for (const auto& hook : hooks) hook->end(reason, exit_code); };
  const auto at_exit = [&](int exit_code) { end_hooks("error", exit_code); };
  Interruption interruption;
  Ranks alone;
  const std::unique_ptr<Ranks> ranks = end_job_on_error(alone, [&] {
    alone.at_exit(at_exit, 0);
    const Launch launch = find_launch();
    if (launch.rank == 0)  // before a machine's time is lost with anything that may fail
      for (const auto& hook : hooks) hook->start(argc, argv);
    interruption.watch(end_before_training(alone, launch.size > 1));
    prepare_cuda(launch);
    return connect_ranks(launch);
  });
  return end_job_on_error(*ranks, [&] {
    double longest_wait = 0;
    for (const auto& hook : hooks) longest_wait += hook->longest_wait();
    ranks->at_exit(at_exit, longest_wait);
    interruption.watch(end_before_training(*ranks, false));
    const int code = run_rank(argc, argv, *ranks, hooks, interruption, train);
    interruption.end_watch();
    end_hooks(code == 0 ? "done" : "stopped", code);
    ranks->barrier(1e6);  // when another rank has ended with exit code 75, a launcher might end rank 0's upload
    const uint64_t ending = ranks->calls().enter("MPI_Finalize", 0);
    end_mpi();
    ranks->calls().leave(ending);
    ranks->finish();
    return code;
  });
}
