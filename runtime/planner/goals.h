// Goals in reverse: the largest model (or the given one) for a number of days or dollars, and the cheapest devices for it.
#pragma once

#include <string>
#include <vector>

#include "runtime/planner/search.h"

struct Goal {
  double days = 0, dollars = 0;  // at most; 0: any

  // Tokens that these devices train until one of the limits is met.
  double reach(const PlannedTime& time, const Rent& rent) const;
  // The same at the rent with which they train more.
  double reach(const PlannedTime& time) const;
  bool is_met(const PlannedTime& time) const { return reach(time) >= time.tokens; }
  // Dollars of the cheaper rent that meets the goal; infinite: neither does, or prices are not known.
  double least_dollars(const PlannedTime& time) const;
  // Could the goal be met if these devices did nothing but multiply?
  bool may_be_met(const Rented& rented, const PlannedRun& run, bool is_fp32) const;
  // The goals as on the command line.
  std::string text() const;
};

// One model, and devices that train it.
struct GoalPlan {
  std::string model;
  PlannedRun run = {};
  std::vector<Candidate> rows = {};
  bool is_met = false;  // does one of the rows meet the goal?
};

// Rows that meet the goal come first, and of them the cheapest.
void sort_rows(GoalPlan& plan, const Goal& goal);

// The result as text for the terminal; and as one JSON object: model, parameters, tokens, expected_loss (nats),
// meets_goal, and rows as in search.h, each with tokens_within_goal and meets_goal.
std::string goal_lines(const GoalPlan& plan, const Goal& goal);
std::string text_of(const GoalPlan& plan, const Goal& goal);
