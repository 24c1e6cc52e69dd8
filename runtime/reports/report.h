// What is measured of a step, and said of it (runtime/reports/telemetry.cuh): a line on the terminal, an object in
// metrics.jsonl, a table of kernels at the end.
//
// The keys of metrics.jsonl, one object per line. A number that is not finite or not known is null.
//
//   a step
//     step                   its number, from 1
//     loss                   mean per token over the global batch, before the step's update
//     grad_norm              L2 norm of the gradients, before clipping and without the loss scale. With --delay 1 of those
//                            that the step has applied, the gradients of the step before; 0: it had none
//     lr                     learning rate, by which the gradients of this step are applied
//     tokens                 trained so far: step times the tokens of one step
//     step_ms                milliseconds on the device
//     tokens_per_s           in this step, all ranks together
//     flops_per_s            in this step, all ranks together; 6Ψ + 6LCT per token (model.cuh)
//     mfu                    flops_per_s divided by the peak of all devices; null: the peak is not known
//     time_ms                object: where step_ms went on rank 0's device. The parts add up to step_ms:
//       compute              all that the others are not, gaps between kernels included
//       exposed              object: waiting for communication, by group of ranks; {} if there is only one rank
//       bubble               waiting for other stages of the pipeline (--pp): for their messages, on their way or not sent
//                            yet, and where all stages meet behind the last backward (the groups ends and world)
//       data                 waiting for samples
//     left_out               true: the update was not applied; else the key is absent
//     loss_scale             of the next step; fp16 only
//     island                 --islands: 0, loss, grad_norm and left_out are the first island's; or "mean", at outer steps:
//                            loss and grad_norm are the mean over all islands
//   a step, if there are several ranks: the bytes that rank 0 sent in it
//     comm_bytes             object: bytes by collective (all_reduce, reduce_scatter, all_gather)
//     comm_bytes_by_group    object: the same for each group of ranks (gpt/mesh.cuh)
//     comm_ms                milliseconds in collectives, of all groups together, in the step that waits for them; in the
//                            first 10 steps of a start, in each tenth step, and in all with --profile, --trace or
//                            --trace-tensors; else the key is absent
//     comm_exposed_ms        the part of them in which the device only waited; in the same steps
//     ranks                  list, in steps that the terminal shows: these keys of every rank
//   Waits are measured where collectives are timed. In other steps time_ms has the shares of the last such step, but for
//   data, whose waits are measured in each. A stage's first wait counts: while it waits for gradients of its data
//   group, it does not wait for other stages.
//   an evaluation (--val-every)
//     step                   number of updates done before it
//     val_loss               mean per token; with several sets of --val the first one's
//     val_loss_NAME          the same of another set
//   a text (--sample-every, --sample-seconds)
//     step                   number of updates done before it
//     sample                 the text; bytes that are no UTF-8 are replaced
//   an incident: the guard found something wrong with a step, and the run did not roll back
//     step                   its number
//     incident               text
//   a rollback (--on-spike rollback)
//     step                   the step that the run went back to; the lines of later steps are removed
//     rolled_back_from       the step that went wrong
//     samples_left_out       [first, last] in the order in which samples are taken
//     reason                 text
//   every line: the bill so far, earlier starts included (runtime/reports/bill.h)
//     hours                  in which a process of the run existed
//     goodput                seconds of the steps in this file, without those that were undone or whose update was left out,
//                            divided by these hours
//     lost_s                 object: seconds that went into setup, checkpoints, evaluation, samples, data, left_out (steps
//                            whose update was left out), rollbacks, restarts. With the seconds of the steps, which contain those for data, they add up to hours
//     restarts               how often the run was resumed
//     device_hours           hours times devices
//     cost                   device_hours times --price; absent if no price was ever given
//     unpriced_device_hours  device-hours without a price; absent if there are none, or no cost
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "kernels/device/timeline.h"
#include "runtime/reports/bill.h"
#include "runtime/reports/ceilings.h"

// Bytes that one rank sent in one step.
struct StepTraffic {
  std::map<std::string, std::map<std::string, double>> bytes;  // by group of ranks and collective
  bool is_timed = false;                              // if not, the next three are not known
  double milliseconds = 0, exposed_milliseconds = 0;  // in collectives; the part of that in which the device only waited
  StepTime waits;                                     // the exposed part in seconds, by cause
  std::vector<std::string> of_ranks;  // on rank 0 those of all ranks, if gathered; else empty texts or none
};

// The run went back from step `from` to the earlier step `to`. The samples after step `to`, first_sample to last_sample
// in the order in which samples are taken, are left out.
struct Rollback {
  size_t to, from, first_sample, last_sample;
  std::string reason;
};

// As in metrics.jsonl. A rank sends its traffic to rank 0 as the text of that.
nlohmann::ordered_json object_of(const StepTraffic& traffic);
nlohmann::ordered_json object_of(const StepTime& time);

// A step on one rank, as it was measured.
struct MeasuredStep {
  double seconds = 0;                     // the median; 0: no step was measured
  double exposed = 0;                     // the median of the seconds in which the device only waited for communication
  std::vector<KernelTotal> kernels = {};  // of one step; empty: not known
};

// Prints a table of kernels. totals: of `steps` steps together. The column "of ceiling" is the shortest time in which
// the device could move a kernel's bytes and do its FLOPs, divided by the measured time.
void print_profile(std::vector<KernelTotal> totals, size_t steps, const std::optional<Ceilings>& ceilings);
