// How a plan is shown, and its cluster and goals (runtime/planner/program.cuh).
#pragma once

#include <cstddef>
#include <string>

struct PlanOptions {
  std::string mesh;       // auto: the search chooses how ranks split the work
  std::string cluster;    // to plan for, or to forecast on; empty: this device
  std::string calibrate;  // file for the measurements; empty: nothing is measured
  double days = 0, budget = 0;  // goals; 0: none
  bool has_goal() const { return days > 0 || budget > 0; }
  bool json = false;
  int ranks = 0;                  // that are planned for; 0: the cluster's devices, else those that were started
  double checkpoint_seconds = 0;  // that training waits for a checkpoint; 0: not measured
  std::string recipe;             // slurm, kubernetes or skypilot: the file that starts the planned run; empty: none
  size_t row = 1;                 // the row of the plan's table that the recipe starts
};
