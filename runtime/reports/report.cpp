#include "runtime/reports/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include <sys/resource.h>

#include <nlohmann/json.hpp>

#include "runtime/reports/console.h"

namespace {

nlohmann::ordered_json object_of(const StepTraffic& traffic) {
  nlohmann::ordered_json groups = nlohmann::ordered_json::object(), sums = groups;
  for (const auto& [group, collectives] : traffic.bytes)
    for (const auto& [name, bytes] : collectives) {
      const size_t rounded = size_t(bytes + 0.5);
      groups[group][name] = rounded;
      sums[name] = sums.value(name, size_t(0)) + rounded;
    }
  nlohmann::ordered_json fields = {{"comm_bytes", sums}, {"comm_bytes_by_group", groups}};
  if (!traffic.is_timed) return fields;
  fields["comm_ms"] = traffic.milliseconds;
  fields["comm_exposed_ms"] = traffic.exposed_milliseconds;
  return fields;
}

nlohmann::ordered_json milliseconds(const StepTime& time) {
  nlohmann::ordered_json exposed = nlohmann::ordered_json::object();
  for (const auto& [group, seconds] : time.exposed) exposed[group] = 1e3 * seconds;
  return {{"compute", 1e3 * time.compute}, {"exposed", exposed}, {"bubble", 1e3 * time.bubble}, {"data", 1e3 * time.data}};
}

void add_traffic(nlohmann::ordered_json& fields, const StepTraffic& traffic) {
  fields.update(object_of(traffic));
  for (const std::string& text : traffic.of_ranks)
    if (!text.empty()) fields["ranks"].push_back(nlohmann::ordered_json::parse(text));
}

}  // namespace

std::string text_of(const StepTraffic& traffic) { return object_of(traffic).dump(); }

Report::Report(size_t steps, double tokens, double flops, double peak, const std::filesystem::path& metrics, size_t start)
    : steps_(steps), tokens_(tokens), flops_(flops), peak_(peak) {
  if (!metrics.empty()) log_.emplace(metrics, start);
}

void Report::step(const StepResult& s, const StepTime& time, const std::optional<StepTraffic>& traffic, const Bill& bill,
                  bool printed, double seconds_left) {
  nlohmann::ordered_json fields = metrics(s);
  fields["time_ms"] = milliseconds(time);
  if (traffic) add_traffic(fields, *traffic);
  if (printed) print(s, traffic, seconds_left);
  log(std::move(fields), bill);
}

void Report::validation(size_t step, const ValidationLosses& losses, const Bill& bill) {
  nlohmann::ordered_json fields = {{"step", step}};
  std::printf("step %5zu/%zu", step, steps_);
  for (const auto& [key, loss] : losses) std::printf(" | %s %.4f", key.c_str(), loss), fields[key] = loss;
  std::printf("\n");
  log(std::move(fields), bill);
}

void Report::sample(size_t step, const std::string& text, const Bill& bill) {
  log({{"step", step}, {"sample", text}}, bill);
}

// Removes the lines of the undone steps; the line of the rollback holds the bill, costs of these steps included.
void Report::rollback(const Rollback& r, const Bill& bill) {
  if (log_) log_->go_back(r.to);
  std::printf("rolled back from step %zu to step %zu, and on without samples %zu to %zu\n", r.from, r.to, r.first_sample,
              r.last_sample);
  log({{"step", r.to},
       {"rolled_back_from", r.from},
       {"samples_left_out", {r.first_sample, r.last_sample}},
       {"reason", r.reason}}, bill);
}

void Report::log(nlohmann::ordered_json fields, const Bill& bill) {
  bill.add_to(fields);
  if (log_) log_->append(fields);
}

void Report::finish() {
  if (log_) log_->finish();
}

nlohmann::ordered_json Report::metrics(const StepResult& s) const {
  nlohmann::ordered_json fields = {{"step", s.step},
                                   {"loss", s.loss},
                                   {"grad_norm", s.norm},
                                   {"lr", s.learning_rate},
                                   {"tokens", s.step * size_t(tokens_)},
                                   {"step_ms", s.seconds * 1e3},
                                   {"tokens_per_s", tokens_ / s.seconds},
                                   {"flops_per_s", flops_ / s.seconds},
                                   {"mfu", peak_ > 0 ? flops_ / s.seconds / peak_ : NAN}};
  if (!s.applied) fields["left_out"] = true;
  if (s.loss_scale > 0) fields["loss_scale"] = s.loss_scale;
  if (s.of_islands == 1) fields["island"] = 0;
  if (s.of_islands > 1) fields["island"] = "mean";
  return fields;
}

void Report::print(const StepResult& s, const std::optional<StepTraffic>& traffic, double seconds_left) const {
  std::printf("step %5zu/%zu | loss %.4f | norm %.3f | lr %.2e | %.1f ms | %s tokens/s | ", s.step, steps_, s.loss,
              s.norm, s.learning_rate, s.seconds * 1e3, with_commas(tokens_ / s.seconds).c_str());
  if (peak_ > 0) std::printf("MFU %.1f%% | ", 100 * flops_ / s.seconds / peak_);
  else std::printf("%.0f GFLOP/s | ", flops_ / s.seconds / 1e9);
  if (traffic && traffic->is_timed) std::printf("comm %.1f ms, %.1f exposed | ", traffic->milliseconds, traffic->exposed_milliseconds);
  std::printf("%s left\n", duration(seconds_left).c_str());
  std::fflush(stdout);
}

void Report::incident(const StepResult& s, const std::string& reason, const std::string& consequence, const Bill& bill) {
  std::printf("step %5zu/%zu | %s%s", s.step, steps_, reason.c_str(), consequence.c_str());
  if (s.loss_scale > 0) std::printf(", loss scale %g", s.loss_scale);
  std::printf("\n");
  if (!consequence.empty()) log({{"step", s.step}, {"incident", reason + consequence}}, bill);
}

void Report::print_summary(size_t steps, double shortest_s, double seconds) const {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  std::printf("%zu steps in %s; fastest step %.1f ms; peak host memory %s MiB\n", steps, duration(seconds).c_str(),
              shortest_s * 1e3, with_commas(double(usage.ru_maxrss) / 1024).c_str());
}

void print_profile(std::vector<KernelTotal> totals, size_t steps, const std::optional<Ceilings>& ceilings) {
  double milliseconds = 0, shortest = 0;
  for (const KernelTotal& total : totals) {
    milliseconds += total.milliseconds;
    if (ceilings) shortest += ceilings->milliseconds(total.bytes, total.flops);
  }
  std::printf("%-28s %8s %10s %7s %9s %10s%s   (a step, mean of %zu)\n", "kernel", "calls", "ms", "share", "GB/s",
              "GFLOP/s", ceilings ? "  of ceiling" : "", steps);
  std::sort(totals.begin(), totals.end(), [](auto& a, auto& b) { return a.milliseconds > b.milliseconds; });
  for (const KernelTotal& total : totals) {
    std::printf("%-28s %8.1f %10.3f %6.1f%% %9.1f %10.1f", total.name.c_str(), double(total.calls) / double(steps),
                total.milliseconds / double(steps), 100 * total.milliseconds / milliseconds,
                total.bytes / total.milliseconds / 1e6, total.flops / total.milliseconds / 1e6);
    if (ceilings) std::printf(" %10.1f%%", 100 * ceilings->milliseconds(total.bytes, total.flops) / total.milliseconds);
    std::printf("\n");
  }
  std::printf("%-28s %8s %10.3f", "all", "", milliseconds / double(steps));
  if (ceilings)
    std::printf("%29s %10.1f%%\nceiling: the longer of bytes at %.1f GB/s and FLOPs at %.1f GFLOP/s", "",
                100 * shortest / milliseconds, ceilings->copy / 1e9, ceilings->product / 1e9);
  std::printf("\n");
}
