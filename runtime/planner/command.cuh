// --plan, which needs no device, and --mesh auto, which chooses how ranks split the work.
#pragma once

#include "gpt/command.h"
#include "gpt/end_job.cuh"
#include "runtime/planner/recipe.cuh"

inline bool planner_without_devices(Options& o, Control& control) {
  if (o.plan && control.rank() == 0) print_planned(o, control.size());
  return o.plan;
}

inline void planner_before_mesh(Options& o, Control& control, int device) {
  if (!o.of<PlanOptions>().mesh.empty()) end_job_on_error(control, [&] { choose_mesh(o, control, device); });
}
