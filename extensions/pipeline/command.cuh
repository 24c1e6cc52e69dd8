// A pipeline looks at its environment before its stages are connected.
#pragma once

#include <string>

#include "gpt/command.h"
#include "gpt/launch.h"
#include "gpt/options.h"
#include "gpt/ranks.h"
#include "kernels/device/driver.cuh"

// The reason why a pipeline might wait for ever on this device with these environment variables; empty: it does not.
inline std::string pipeline_problem() {
  CUmoduleLoadingMode mode = CU_MODULE_LAZY_LOADING;  // assumed if the driver does not answer
  driver_function<decltype(cuModuleGetLoadingMode)>("cuModuleGetLoadingMode", 11070)(&mode);
  if (mode != CU_MODULE_EAGER_LOADING)
    return "kernels would be loaded lazily, which may stop the stages for ever: another library has started CUDA before this "
           "program could choose; start the ranks with CUDA_MODULE_LOADING=EAGER";
  if (environment("NCCL_LAUNCH_ORDER_IMPLICIT") == "1")
    return "NCCL_LAUNCH_ORDER_IMPLICIT=1 lets messages wait for each other, which may stop the stages for ever: unset it";
  return "";
}

// Advice about the environment of a pipeline; empty: none.
inline std::string pipeline_advice() {
  const std::string queues = environment("CUDA_DEVICE_MAX_CONNECTIONS");
  if (queues != "1") return "";
  return "CUDA_DEVICE_MAX_CONNECTIONS is 1, and the streams of a pipeline share one queue, in which they wait for each "
         "other: unset it, or set 32";
}

inline void pipeline_before_groups(Options& o, Ranks& ranks) {
  if (o.mesh.pp == 1) return;
  if (const std::string problem = pipeline_problem(); !problem.empty()) usage_error("--pp: ", problem);
  if (const std::string advice = pipeline_advice(); ranks.rank() == 0 && !advice.empty()) print_error("--pp: " + advice);
}
