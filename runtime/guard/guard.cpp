#include "runtime/guard/guard.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/json_fields.h"

namespace {

// The value that lies z standard deviations above the mean of a window; infinite until the window is full.
float limit_of(const std::deque<double>& window, const GuardOptions& options) {
  if (window.size() < options.window) return INFINITY;
  double sum = 0, squares = 0;
  for (double value : window) sum += value;
  const double mean = sum / double(options.window);
  for (double value : window) squares += (value - mean) * (value - mean);
  return float(mean + options.z * std::sqrt(squares / double(options.window)));
}

void add(std::deque<double>& window, double value, size_t size) {
  window.push_back(value);
  if (window.size() > size) window.pop_front();
}

}  // namespace

Guard::Judgement Guard::judge(double loss, double norm, bool applied, const StepLimits& limit) {
  previous_ = spike_limits();
  const bool finite = std::isfinite(loss) && std::isfinite(norm);
  std::string reason;  // the comparisons are in float, as on the device
  if (!finite) reason = concat("loss ", loss, ", gradient norm ", norm, ": not finite");
  else if (float(loss) > limit.loss) reason = concat("loss ", loss, " is a spike: above ", limit.loss);
  else if (float(norm) > limit.norm) reason = concat("gradient norm ", norm, " is a spike: above ", limit.norm);
  in_a_row_ = applied ? 0 : in_a_row_ + 1;
  left_out_ += !applied;
  if (finite && applied) {
    add(losses_, loss, options_.window);
    add(norms_, norm, options_.window);
  }
  if (reason.empty()) return {};
  if (in_a_row_ >= options_.most_in_a_row)
    fail(reason, "; so were the ", in_a_row_ - 1, " steps before: lower --lr, check the data, or resume from an earlier "
         "checkpoint");
  if (finite && options_.on_spike == "rollback") return {Response::roll_back, reason};
  return {applied ? Response::none : Response::left_out, reason};
}

void Guard::count_rollback() {
  if (++rollbacks_ > options_.most_rollbacks)
    fail("after ", options_.most_rollbacks, " rollbacks (--max-rollbacks) there is another spike: lower --lr, check the "
         "data, or go on with --on-spike skip");
}

nlohmann::json Guard::state() const {
  return {{"losses", losses_}, {"norms", norms_}, {"limits", {previous_.loss, previous_.norm}},
          {"left_out", left_out_}, {"in_a_row", in_a_row_}, {"rollbacks", rollbacks_}};
}

std::string Guard::state_text() const { return state().dump(); }

void Guard::restore(JsonFields state, size_t steps) {
  for (const auto& [key, window] : {std::pair("losses", &losses_), std::pair("norms", &norms_)}) {
    const auto numbers = state.list<double>(key, "numbers", [](const auto& value) { return value.is_number(); });
    if (numbers.size() > options_.window) state.refuse(key, concat("a list of at most ", options_.window, " numbers (--spike-window)"));
    window->assign(numbers.begin(), numbers.end());
  }
  // JSON has no infinity: it is stored as null.
  const auto limits = state.list<nlohmann::json>("limits", "numbers or nulls", [](const auto& value) {
    return value.is_null() || value.is_number();
  });
  if (limits.size() != 2) state.refuse("limits", "a list of two");
  const auto limit = [](const nlohmann::json& value) { return value.is_null() ? INFINITY : value.get<float>(); };
  previous_ = {limit(limits[0]), limit(limits[1])};
  left_out_ = state.size("left_out", 0, steps);
  in_a_row_ = state.size("in_a_row");
  rollbacks_ = std::max(rollbacks_, state.size("rollbacks"));
}

StepLimits Guard::spike_limits() const { return {limit_of(losses_, options_), limit_of(norms_, options_)}; }
