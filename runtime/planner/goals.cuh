// --plan --days, --plan --budget, as the program does them.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "runtime/planner/goals.h"
#include "runtime/planner/program.cuh"

// A model by its name, with steps of its critical batch (a power of two of samples), unless --global-batch says
// otherwise.
inline Options options_for(Options o, const std::string& model) {
  o.model = model;
  decide_shape(o, o.init, false, open_data(o));
  const PlannedRun run = planned_run(o);
  const double samples = critical_batch(run.loss(suitable_tokens(run.parameters))) / o.seq_len;
  if (!o.global_batch)
    for (o.global_batch = 1; 2 * o.global_batch <= samples;) o.global_batch *= 2;
  o.micro_batch = 1;
  complete_options(o, 1);
  return o;
}

// Adds a row for the fastest way to train on a part of this cluster: the smallest part that meets the goal. with_whole:
// if none does, the whole cluster gets the row. Returns whether there is a row.
inline bool add_row(GoalPlan& plan, const Options& o, const Cluster& cluster, const Goal& goal, bool with_whole) {
  PlannedRun multiplied = plan.run;
  multiplied.parameters -= double(o.shape.positions) * o.shape.channels;
  for (const Rented& part : parts_of(cluster)) {
    const bool is_wanted = with_whole && part.ranks == cluster.devices();
    if (!is_wanted && !goal.may_be_met(part, multiplied, o.dtype == "fp32")) continue;
    const SearchResult found = search_meshes(o, device_of(cluster), {part}, 1);
    if (is_wanted && found.fastest.empty()) fail(goal.text(), ": ", nothing_fits_text(found, device_of(cluster)));
    if (found.fastest.empty() || !(is_wanted || goal.is_met(found.fastest[0].time))) continue;
    plan.rows.push_back(found.fastest[0]);
    plan.is_met |= goal.is_met(found.fastest[0].time);
    return true;
  }
  return false;
}

// Returns the rows of its table.
inline std::vector<Candidate> print_goals(const Options& given) {
  const PlanOptions& wanted = given.of<PlanOptions>();
  const Goal goal = {wanted.days, wanted.budget};
  const bool anywhere = wanted.cluster.empty();
  const std::vector<Cluster> clusters = anywhere ? example_clusters() : std::vector{find_cluster(wanted.cluster)};
  const std::string where = anywhere ? "any cluster of runtime/planner/clusters" : "the cluster " + clusters[0].name;
  if (!anywhere && wanted.budget > 0 && clusters[0].price == 0 && clusters[0].spot_price == 0)
    usage_error("--budget ", wanted.budget, ": ", where, " has no price: write price_per_device_hour into a copy of its file");
  const bool has_model = given.model_given || given.wanted.layers || given.wanted.heads || given.wanted.channels || !given.init.empty();
  std::vector<std::string> models = has_model ? std::vector<std::string>{given.model} : gpt3_models();
  Options o;
  GoalPlan plan;
  while (!models.empty() && !plan.is_met) {  // the largest first
    o = options_for(given, models.back());
    plan = {models.back(), planned_run(o)};
    models.pop_back();
    std::set<std::string> done;  // more of the same devices would cost as much
    for (const Cluster& c : clusters)
      if (!done.contains(c.device.name) && add_row(plan, o, c, goal, has_model && !anywhere))
        done.insert(c.device.name);
  }
  if (!plan.is_met && (given.steps_given || plan.rows.empty()))
    fail(goal.text(), ": no part of ", where, " trains ", plan.model, " on ", with_commas(plan.run.tokens),
         " tokens within that: raise --days or --budget", given.steps_given ? ", or lower --steps" : "");
  sort_rows(plan, goal);
  if (!has_model) o.words.insert(o.words.begin() + 1, {"--model", plan.model});
  for (Candidate& c : plan.rows) c.command = command_of(c, o.words);
  if (!wanted.json) {
    describe_model(o);
    std::printf("batch     %d samples: %s tokens per step\n", o.global_batch, with_commas(o.tokens()).c_str());
  }
  print_line(wanted.json ? text_of(plan, goal) : goal_lines(plan, goal));
  if (!plan.is_met && wanted.recipe.empty())
    fail(goal.text(), " is not met: raise --days or --budget, or choose a smaller model");
  return plan.rows;
}
