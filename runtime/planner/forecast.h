// How long a training step takes on a cluster, from first principles: runtime/planner/forecast.md derives each formula.
//
//   kernels         the longer of FLOPs / rate and bytes / bandwidth, and the gap to the next kernel (dev/roofline.md)
//   collectives     latency and bytes / bandwidth of a ring, by the links that the group crosses
//   pipelines       time of the schedules of extensions/pipeline/pipeline.h, in closed form
//   overlap         of communication only the part counts that the code can't overlap (gpt/README.md, pages of rooms)
#pragma once

#include <string>
#include <vector>

#include "gpt/step_options.h"
#include "runtime/planner/cluster.h"

// Seconds. The first line and the exposed parts of tp, cp, dp, islands and offload add up to the step, on the slowest pipeline
// stage.
struct Forecast {
  double products = 0, attention = 0, memory = 0, launches = 0, bubble = 0, update = 0;
  struct Communication {
    double total = 0, exposed = 0;
  } tp, cp, dp, pp, islands, offload;  // islands: of outer steps, a step's share; pp's exposed messages lengthen the bubble; offload: to the host's memory and back
  double seconds = 0;

  double tokens_per_s = 0;
  double model_flops = 0;  // of a step: 6·Ψ + 6·L·C·T a token
  double mfu = 0;          // of the dense peak of all devices; 0: not known

  const char* limit = "";  // the largest part: products, attention, memory, communication, bubble, launches, offload
  std::string explanation() const;  // the same in a sentence
};

// step: must have no batch_problem() and no shape_problem(). The devices' memory is not checked.
Forecast forecast(const StepOptions& step, const Cluster& cluster);

// Sets what the cluster decides: how many ranks share a host, and who computes attention by --attention auto: on Hopper our kernels
// for it, where they can (extensions/hopper/model.cuh says so of this device).
void adapt(StepOptions& step, const Cluster& cluster);

// Bytes of AdamW's moments and of masters, for each parameter.
double optimizer_bytes(const StepOptions& step);

// ---- parts of the forecast, for tests

// Seconds in which one pipeline stage computes a micro-batch, in all of its chunks. input + weight: backward
struct StageTimes {
  double forward = 0, backward = 0, weight = 0;
  double sum() const { return forward + backward; }
};

// Seconds from the first action to the end of the last one. message: seconds of a message
double pipeline_seconds(const std::string& schedule, const std::vector<StageTimes>& stages, int chunks,
                        int micro_batches, double message);
