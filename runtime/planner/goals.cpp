#include "runtime/planner/goals.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/text.h"
#include "runtime/reports/console.h"

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
  const auto key = [&](const Candidate& c) { return std::pair(!goal.is_met(c.time), goal.least_dollars(c.time)); };
  std::ranges::stable_sort(plan.rows, {}, key);
}

std::string goal_lines(const GoalPlan& plan, const Goal& goal) {
  const double parameters = plan.run.parameters;
  const auto tokens_text = [&](double tokens) {
    return formatted("%s tokens, %.3g for each parameter: loss about %.2f", with_commas(tokens).c_str(),
                     tokens / parameters, plan.run.loss(tokens));
  };
  const char* met = plan.is_met ? "is met, margins aside; the cheapest first" : "is not met";
  std::string lines = concat("run       ", tokens_text(plan.run.tokens), " (arXiv:2203.15556)\ngoal      ", goal.text(),
                             ' ', met, "\n          ", table_of(plan.rows));
  for (const Candidate& c : plan.rows) {
    const double tokens = goal.reach(c.time), least = tokens / c.time.margin.most(1), most = tokens / c.time.margin.least(1);
    lines += concat("\nreach     ", c.step.mesh.ranks(), " of ", c.cluster.name, ": ", tokens_text(tokens),
                    "; with its margin ", with_commas(least), " to ", with_commas(most), " tokens");
  }
  return lines;
}

std::string text_of(const GoalPlan& plan, const Goal& goal) {
  nlohmann::ordered_json rows = objects_of(plan.rows);
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i].update({{"tokens_within_goal", goal.reach(plan.rows[i].time)}, {"meets_goal", goal.is_met(plan.rows[i].time)}});
  const PlannedRun& run = plan.run;
  return json_text({{"model", plan.model}, {"parameters", run.parameters}, {"tokens", run.tokens},
                    {"expected_loss", run.loss(run.tokens)}, {"meets_goal", plan.is_met}, {"rows", rows}});
}
