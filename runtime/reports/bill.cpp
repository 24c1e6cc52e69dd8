#include "runtime/reports/bill.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "runtime/reports/console.h"

namespace {

// A number of a line of metrics, or `otherwise` if the line does not have it. After a crash, or after somebody edited
// the file, a line may hold anything.
double number(const nlohmann::json& fields, const char* name, double otherwise = 0) {
  return fields.contains(name) && fields[name].is_number() ? fields[name].get<double>() : otherwise;
}

// The kinds of lost time in a bill: key in metrics, name on the terminal.
using Lost = Bill::Lost;
constexpr std::tuple<const char*, const char*, double Lost::*> losses[] = {
    {"setup", "set-up", &Lost::setup},          {"checkpoints", "checkpoints", &Lost::checkpoints},
    {"evaluation", "evaluation", &Lost::evaluation}, {"samples", "samples", &Lost::samples},
    {"data", "data", &Lost::data},              {"left_out", "left-out updates", &Lost::left_out}, {"rollbacks", "rollbacks", &Lost::rollbacks},
    {"restarts", "restarts", &Lost::restarts}};

// The time of a step from its line of metrics. Lines of older versions have no parts: all counts as compute.
StepTime step_time(const nlohmann::json& fields) {
  const nlohmann::json parts = fields.value("time_ms", nlohmann::json()), none = nlohmann::json::object();
  StepTime time;
  const nlohmann::json groups = parts.is_object() ? parts.value("exposed", none) : none;
  if (groups.is_object())
    for (const auto& [group, _] : groups.items()) time.exposed[group] = number(groups, group.c_str()) / 1e3;
  time.bubble = number(parts, "bubble") / 1e3, time.data = number(parts, "data") / 1e3;
  time.compute = number(fields, "step_ms") / 1e3 - time.sum();
  return time;
}

struct OldMetrics {
  nlohmann::json last;           // the last line that holds a bill; null: there is none
  StepTime kept;                 // time of the steps that are kept
  double seconds_of_undone = 0;  // and of those that are not
};

OldMetrics read_metrics(const std::filesystem::path& path, size_t kept) {
  OldMetrics metrics;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line) && !file.eof();) {
    nlohmann::json fields = nlohmann::json::parse(line, nullptr, false);
    if (!fields.is_object() || !fields.contains("hours")) continue;
    StepTime time = step_time(fields);
    if (fields.contains("left_out")) time = {};  // it is lost already
    if (number(fields, "step") > double(kept)) metrics.seconds_of_undone += time.sum();
    else metrics.kept.add(time);
    metrics.last = std::move(fields);
  }
  return metrics;
}

}  // namespace

double StepTime::sum() const {
  double sum = compute + bubble + data;
  for (const auto& [_, seconds] : exposed) sum += seconds;
  return sum;
}

void StepTime::add(const StepTime& other) {
  compute += other.compute, bubble += other.bubble, data += other.data;
  for (const auto& [group, seconds] : other.exposed) exposed[group] += seconds;
}

StepTime divided(double seconds, double data, const StepTime& like) {
  StepTime time = like;
  time.data = std::clamp(data, 0.0, seconds);
  const double rest = seconds - time.data, all = like.sum(), share = all > 0 ? rest / all : 0;
  time.bubble *= share;
  for (auto& [_, waited] : time.exposed) waited *= share;
  time.compute = 0;
  time.compute = std::max(0.0, seconds - time.sum());
  return time;
}

// Metrics of older versions have no device-hours: then the number of devices is assumed to have been the same as now.
void Bill::restore(const std::filesystem::path& metrics, size_t step) {
  const auto [last, kept, repeated_s] = read_metrics(metrics, step);
  if (last.is_null()) return;
  steps = kept;
  before_.hours = number(last, "hours");
  before_.device_hours = number(last, "device_hours", before_.hours * devices_);
  before_.cost = number(last, "cost");
  before_.unpriced_device_hours = number(last, "unpriced_device_hours", last.contains("cost") ? 0 : before_.device_hours);
  const nlohmann::json old = last.value("lost_s", nlohmann::json());
  for (const auto& [key, _, seconds] : losses) lost.*seconds = number(old, key);
  lost.restarts += repeated_s;
  restarts_ = size_t(std::clamp(number(last, "restarts"), 0.0, 1e9)) + 1;
}

void Bill::add_rollback(const std::filesystem::path& metrics, size_t step, double seconds) {
  const OldMetrics old = read_metrics(metrics, step);
  lost.rollbacks += seconds + old.seconds_of_undone;
  steps = old.kept;
}

void Bill::end_setup() { lost.setup += seconds_since(start_); }

Bill::Spent Bill::spent() const {
  const double hours = seconds_since(start_) / 3600;
  const double device_hours = hours * devices_;
  return {before_.hours + hours, before_.device_hours + device_hours,
          before_.unpriced_device_hours + (price_ > 0 ? 0 : device_hours), before_.cost + device_hours * price_};
}

void Bill::add_to(nlohmann::ordered_json& metrics) const {
  const Spent spent = this->spent();
  metrics["hours"] = spent.hours;
  metrics["goodput"] = steps.sum() / (3600 * spent.hours);
  for (const auto& [key, _, seconds] : losses) metrics["lost_s"][key] = lost.*seconds;
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
  const char* before = "; lost: ";
  for (const auto& [_, name, seconds] : losses)
    if (seconds != &Lost::left_out || lost.left_out > 0) std::printf("%s%s %.1f s", std::exchange(before, ", "), name, lost.*seconds);
  std::printf(" (%zu)", restarts_);
  if (failed_hooks > 0) std::printf(", %zu failed hooks", failed_hooks);
  std::printf("\n");
  print_shares(3600 * spent.hours);
  if (spent.cost <= 0) return;
  std::printf("cost      %.2f so far", spent.cost);
  if (spent.unpriced_device_hours > 0) std::printf(", and %.3g device-hours that had no --price", spent.unpriced_device_hours);
  else std::printf(", %.3f per million tokens", spent.cost / tokens * 1e6);
  if (price_ > 0 && seconds_left > 0)
    std::printf(", about %.2f at the end", spent.cost + seconds_left / 3600 * devices_ * price_);
  if (price_ > 0) std::printf(" (%s%d x %g an hour)", before_.hours > 0 ? "now " : "", devices_, price_);
  std::printf("\n");
}

// The shares of all these seconds, except those below 0.05 %.
void Bill::print_shares(double seconds) const {
  double rest = seconds;
  const char* before = "time      ";
  const auto print = [&](const std::string& name, double part) {
    rest -= part;
    if (part >= 0.0005 * seconds) std::printf("%s%s %.1f %%", std::exchange(before, ", "), name.c_str(), 100 * part / seconds);
  };
  print("compute", steps.compute);
  for (const auto& [group, part] : steps.exposed) print("exposed " + group, part);
  print("bubble", steps.bubble);
  print("data", steps.data);
  before = "; ";
  for (const auto& [key, name, part] : losses)
    if (part != &Lost::data) print(name, lost.*part);
  print("other", rest);
  std::printf("; goodput %.1f %%\n", 100 * steps.sum() / seconds);
}
