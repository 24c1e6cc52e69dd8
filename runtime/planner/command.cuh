// --plan, which needs no device, and --mesh auto, which chooses how ranks split the work.
#pragma once

#include "gpt/command.h"
#include "gpt/end_job.cuh"
#include "runtime/planner/recipe.cuh"

inline bool planner_without_devices(Options& o, Ranks& ranks) {
  if (o.plan && ranks.rank() == 0) print_planned(o, ranks.size());
  return o.plan;
}

inline void planner_before_mesh(Options& o, Ranks& ranks, int device) {
  if (!o.of<PlanOptions>().mesh.empty()) end_job_on_error(ranks, [&] { choose_mesh(o, ranks, device); });
}
