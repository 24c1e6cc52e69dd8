#include "runtime/reports/bill.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

#include "runtime/reports/console.h"

namespace {

// A number of a line of metrics, or `otherwise` if the line does not have it. After a crash, or after somebody edited
// the file, a line may hold anything.
double number(const nlohmann::json& fields, const char* name, double otherwise = 0) {
  return fields.contains(name) && fields[name].is_number() ? fields[name].get<double>() : otherwise;
}

struct OldMetrics {
  nlohmann::json last;           // the last line that holds a bill; null: there is none
  double seconds_of_undone = 0;  // time of the steps that are not kept
};

OldMetrics read_metrics(const std::filesystem::path& path, size_t kept) {
  OldMetrics metrics;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line) && !file.eof();) {
    nlohmann::json fields = nlohmann::json::parse(line, nullptr, false);
    if (!fields.is_object() || !fields.contains("hours")) continue;
    if (number(fields, "step") > double(kept)) metrics.seconds_of_undone += number(fields, "step_ms") / 1e3;
    metrics.last = std::move(fields);
  }
  return metrics;
}

}  // namespace

// Metrics of older versions have no device-hours: then the number of devices is assumed to have been the same as now.
void Bill::restore(const std::filesystem::path& metrics, size_t step) {
  const auto [last, repeated_s] = read_metrics(metrics, step);
  if (last.is_null()) return;
  before_.hours = number(last, "hours");
  before_.device_hours = number(last, "device_hours", before_.hours * devices_);
  before_.cost = number(last, "cost");
  before_.unpriced_device_hours = number(last, "unpriced_device_hours", last.contains("cost") ? 0 : before_.device_hours);
  const nlohmann::json old = last.value("lost_s", nlohmann::json());
  lost = {number(old, "checkpoints"), number(old, "evaluation"), number(old, "data"), number(old, "rollbacks"),
          number(old, "restarts") + repeated_s};
  restarts_ = size_t(std::clamp(number(last, "restarts"), 0.0, 1e9)) + 1;
}

void Bill::add_rollback(const std::filesystem::path& metrics, size_t step, double seconds) {
  lost.rollbacks += seconds + read_metrics(metrics, step).seconds_of_undone;
}

Bill::Spent Bill::spent() const {
  const double hours = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count() / 3600;
  const double device_hours = hours * devices_;
  return {before_.hours + hours, before_.device_hours + device_hours,
          before_.unpriced_device_hours + (price_ > 0 ? 0 : device_hours), before_.cost + device_hours * price_};
}

void Bill::add_to(nlohmann::ordered_json& metrics) const {
  const Spent spent = this->spent();
  metrics["hours"] = spent.hours;
  metrics["lost_s"] = {{"checkpoints", lost.checkpoints}, {"evaluation", lost.evaluation}, {"data", lost.data},
                       {"rollbacks", lost.rollbacks}, {"restarts", lost.restarts}};
  metrics["restarts"] = restarts_;
  if (failed_hooks > 0) metrics["failed_hooks"] = failed_hooks;
  metrics["device_hours"] = spent.device_hours;
  if (spent.cost <= 0) return;
  metrics["cost"] = spent.cost;
  if (spent.unpriced_device_hours > 0) metrics["unpriced_device_hours"] = spent.unpriced_device_hours;
}

void Bill::print(double tokens, double flops, double peak, double seconds_left) const {
  const Spent spent = this->spent();
  std::printf("bill      %s tokens, %.3g FLOPs in %s", with_commas(tokens).c_str(), flops, duration(3600 * spent.hours).c_str());
  if (peak > 0) std::printf(", MFU %.1f%% of it all", 100 * flops / (3600 * spent.device_hours * peak));
  std::printf("; lost: checkpoints %.1f s, evaluation %.1f s, data %.1f s, rollbacks %.1f s, restarts %.1f s (%zu)",
              lost.checkpoints, lost.evaluation, lost.data, lost.rollbacks, lost.restarts, restarts_);
  if (failed_hooks > 0) std::printf(", %zu failed hooks", failed_hooks);
  std::printf("\n");
  if (spent.cost <= 0) return;
  std::printf("cost      %.2f so far", spent.cost);
  if (spent.unpriced_device_hours > 0) std::printf(", and %.3g device-hours that had no --price", spent.unpriced_device_hours);
  else std::printf(", %.3f per million tokens", spent.cost / tokens * 1e6);
  if (price_ > 0 && seconds_left > 0)
    std::printf(", about %.2f at the end", spent.cost + seconds_left / 3600 * devices_ * price_);
  if (price_ > 0) std::printf(" (%s%d x %g an hour)", before_.hours > 0 ? "now " : "", devices_, price_);
  std::printf("\n");
}
