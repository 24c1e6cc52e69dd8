#include "planner/goals.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <sstream>

#include <nlohmann/json.hpp>

#include "runtime/console.h"

constexpr double unlimited = std::numeric_limits<double>::infinity();

double Goal::reach(const PlannedTime& t, const Rent& rent) const {
  const double dollars_a_day = 24 * t.devices * rent.price;
  const double by_dollars = dollars == 0 ? unlimited : dollars_a_day > 0 ? dollars / dollars_a_day : 0;
  return std::min(days > 0 ? days : unlimited, by_dollars) * 86400 * t.forecast.tokens_per_s * (1 - rent.saving.lost);
}

double Goal::reach(const PlannedTime& t) const {
  return std::max(reach(t, t.demand), t.spot.price > 0 ? reach(t, t.spot) : 0);
}

double Goal::least_dollars(const PlannedTime& t) const {
  double least = unlimited;
  for (const Rent& rent : {t.demand, t.spot})
    if (rent.price > 0 && reach(t, rent) >= t.tokens) least = std::min(least, t.dollars(rent));
  return least;
}

bool Goal::may_be_met(const Rented& rented, const PlannedRun& run, bool is_fp32) const {
  const Cluster& c = rented.cluster;
  PlannedTime best = {{}, double(rented.ranks), run.tokens, {c.price, {}}, {c.spot_price, {}}};
  best.forecast.tokens_per_s = rented.ranks * c.device.peak(is_fp32) * c.device.product_share / (6 * run.parameters);
  return is_met(best);
}

std::string Goal::text() const {
  std::ostringstream text;
  if (days > 0) text << "--days " << days << (dollars > 0 ? " " : "");
  if (dollars > 0) text << "--budget " << dollars;
  return text.str();
}

void sort_rows(GoalPlan& plan, const Goal& goal) {
  std::ranges::stable_sort(plan.rows, {}, [&](const Candidate& c) { return std::pair(!goal.is_met(c.time), goal.least_dollars(c.time)); });
}

std::string goal_lines(const GoalPlan& plan, const Goal& goal) {
  const double parameters = plan.run.parameters;
  const auto tokens_text = [&](double tokens) {
    char text[160];
    std::snprintf(text, sizeof text, "%s tokens, %.3g for each parameter: loss about %.2f", with_commas(tokens).c_str(), tokens / parameters,
                  plan.run.loss(tokens));
    return std::string(text);
  };
  std::string lines = "run       " + tokens_text(plan.run.tokens) + " (arXiv:2203.15556)\ngoal      " + goal.text() +
                      (plan.is_met ? " is met, margins aside; the cheapest first\n          " : " is not met\n          ") + table_of(plan.rows);
  for (const Candidate& c : plan.rows) {
    const double tokens = goal.reach(c.time);
    lines += "\nreach     " + std::to_string(c.step.mesh.ranks()) + " of " + c.cluster + ": " + tokens_text(tokens) + "; with its margin " +
             with_commas(tokens / c.time.margin.most(1)) + " to " + with_commas(tokens / c.time.margin.least(1)) + " tokens";
  }
  return lines;
}

std::string text_of(const GoalPlan& plan, const Goal& goal) {
  nlohmann::ordered_json rows = objects_of(plan.rows);
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i]["tokens_within_goal"] = goal.reach(plan.rows[i].time), rows[i]["meets_goal"] = goal.is_met(plan.rows[i].time);
  const nlohmann::ordered_json object = {{"model", plan.model}, {"parameters", plan.run.parameters}, {"tokens", plan.run.tokens},
                                         {"expected_loss", plan.run.loss(plan.run.tokens)},
                                         {"meets_goal", plan.is_met}, {"rows", rows}};
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // a command may hold any bytes
}
