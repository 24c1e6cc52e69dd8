#include "runtime/bill.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

#include "runtime/console.h"

namespace {

// 0 if there is none: after a crash, or an editor, a line may hold anything.
double number(const nlohmann::json& fields, const char* name) {
  return fields.contains(name) && fields[name].is_number() ? fields[name].get<double>() : 0;
}

}  // namespace

void Bill::restore(const std::filesystem::path& metrics, size_t step) {
  std::ifstream file(metrics);
  nlohmann::json last;
  double repeated = 0;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    const nlohmann::json fields = nlohmann::json::parse(line, nullptr, false);
    if (!fields.is_object() || !fields.contains("hours")) continue;
    if (number(fields, "step") > double(step)) repeated += number(fields, "step_ms") / 1e3;
    last = fields;
  }
  if (last.is_null()) return;
  before_s_ = 3600 * number(last, "hours");
  const nlohmann::json old = last.value("lost_s", nlohmann::json());
  lost = {number(old, "checkpoints"), number(old, "evaluation"), number(old, "data"), number(old, "restarts") + repeated};
  restarts_ = size_t(std::clamp(number(last, "restarts"), 0.0, 1e9)) + 1;
}

double Bill::hours() const {
  return (before_s_ + std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count()) / 3600;
}

void Bill::add_to(nlohmann::ordered_json& metrics) const {
  metrics["hours"] = hours();
  metrics["lost_s"] = {{"checkpoints", lost.checkpoints}, {"evaluation", lost.evaluation}, {"data", lost.data},
                       {"restarts", lost.restarts}};
  metrics["restarts"] = restarts_;
  if (price_ > 0) metrics["cost"] = cost(hours());
}

void Bill::print(double tokens, double flops, double peak, double seconds_left) const {
  const double seconds = 3600 * hours();
  std::printf("bill      %s tokens, %.3g FLOPs in %s", with_commas(tokens).c_str(), flops, duration(seconds).c_str());
  if (peak > 0) std::printf(", MFU %.1f%% of it all", 100 * flops / (seconds * peak * devices_));
  std::printf("; lost: checkpoints %.1f s, evaluation %.1f s, data %.1f s, restarts %.1f s (%zu)\n", lost.checkpoints,
              lost.evaluation, lost.data, lost.restarts, restarts_);
  if (price_ <= 0) return;
  std::printf("cost      %.2f so far, %.3f per million tokens", cost(hours()), cost(hours()) / tokens * 1e6);
  if (seconds_left > 0) std::printf(", about %.2f at the end", cost(hours() + seconds_left / 3600));
  std::printf(" (%d x %g an hour)\n", devices_, price_);
}
