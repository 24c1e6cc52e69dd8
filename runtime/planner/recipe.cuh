// --plan --recipe: the file by which Slurm, Kubernetes or SkyPilot starts a planned run, from a template in
// runtime/planner/recipes/. The README.md there lists the variables that a template may use.
#pragma once

#include <cstdlib>

#include <unistd.h>

#include "runtime/hooks/options.h"
#include "runtime/planner/goals.cuh"
#include "runtime/planner/mix.cuh"

// Prints the file that starts one of these rows: runtime/planner/recipes/recipe.sh fills in the template. It gets the
// plan in environment variables.
inline void print_recipe(const Options& o, const std::vector<Candidate>& rows) {
  if (o.of<PlanOptions>().row > rows.size()) usage_error("--recipe: ", rows.size(), " rows of the plan fit: there is no row ", o.of<PlanOptions>().row);
  const auto& [step, time, bytes, cluster, command] = rows[o.of<PlanOptions>().row - 1];
  const Goal goal = {o.of<PlanOptions>().days, o.of<PlanOptions>().budget};
  if (o.of<PlanOptions>().has_goal() && !goal.is_met(time))
    fail("--recipe: row ", o.of<PlanOptions>().row, " does not meet ", goal.text(), ": raise that, or choose another --row");
  if (cluster.devices_per_host > step.mesh.ranks() / cluster.hosts)
    fail("--recipe: ", step.mesh.ranks(), " ranks do not fill hosts of ", cluster.devices_per_host, ": change --ranks");
  const bool on_spot = time.spot.price > 0 && time.dollars(time.spot) == goal.least_dollars(time);
  const Rent& rent = on_spot ? time.spot : time.demand;
  const auto tell = [](const char* name, const auto& value) { setenv(name, concat(value).c_str(), 1); };
  tell("command", command);
  tell("cluster", one_line(cluster.name));
  tell("device", cluster.device.name);
  tell("nodes", cluster.hosts);
  tell("count", step.mesh.ranks() / cluster.hosts);
  tell("spot", on_spot ? "true" : "");
  tell("checkpoint_every", rent.saving.interval / time.forecast.seconds);  // or no number
  tell("after_checkpoint", o.of<HookOptions>().after_checkpoint.empty() ? "" : "true");  // the command itself may be secret
  tell("stop_when", o.of<HookOptions>().stop_when.empty() ? "" : "true");
  tell("on_end", o.of<HookOptions>().on_end.empty() ? "" : "true");
  tell("hook_timeout", o.of<HookOptions>().timeout);
  if (std::system(("bash " + quoted(planner_file("recipes/recipe.sh")) + ' ' + o.of<PlanOptions>().recipe).c_str()) != 0)
    fail("--recipe: runtime/planner/recipes/recipe.sh failed: is it here, and bash, and can stdout be written?");
}

// Prints the plan that the options ask for. With --recipe the plan is on stderr, and stdout has nothing but the recipe.
inline void print_planned(Options& o, int ranks) {
  if (is_mix(o)) return print_mix(o);
  const int out = dup(STDOUT_FILENO);
  if (!o.of<PlanOptions>().recipe.empty()) dup2(STDERR_FILENO, STDOUT_FILENO);
  if (!o.of<PlanOptions>().recipe.empty() && !attempt([&] { open_data(o); }).empty()) {  // the data may be where the run will be
    std::printf("data      are not here: their names tell whether they are text\n");
    if (!o.wanted.vocabulary && !o.train[0].ends_with(".bin")) o.wanted.vocabulary = 256;
    o.train.clear(), o.val.clear();
  }
  const std::vector<Candidate> rows = o.of<PlanOptions>().has_goal() ? print_goals(o) : print_plan(o, ranks);
  std::fflush(stdout);
  dup2(out, STDOUT_FILENO);
  if (!o.of<PlanOptions>().recipe.empty()) print_recipe(o, rows);
}
