#include "runtime/reports/report.h"

#include <algorithm>
#include <cstdio>

#include <nlohmann/json.hpp>

nlohmann::ordered_json object_of(const StepTraffic& traffic) {
  nlohmann::ordered_json groups = nlohmann::ordered_json::object(), sums = groups;
  for (const auto& [group, collectives] : traffic.bytes)
    for (const auto& [name, bytes] : collectives) {
      const size_t rounded = size_t(bytes + 0.5);
      groups[group][name] = rounded;
      sums[name] = sums.value(name, size_t(0)) + rounded;
    }
  nlohmann::ordered_json fields = {{"comm_bytes", sums}, {"comm_bytes_by_group", groups}};
  if (traffic.is_timed)
    fields.update({{"comm_ms", traffic.milliseconds}, {"comm_exposed_ms", traffic.exposed_milliseconds}});
  for (const std::string& text : traffic.of_ranks)
    if (!text.empty()) fields["ranks"].push_back(nlohmann::ordered_json::parse(text));
  return fields;
}

nlohmann::ordered_json object_of(const StepTime& time) {
  nlohmann::ordered_json exposed = nlohmann::ordered_json::object();
  for (const auto& [group, seconds] : time.exposed) exposed[group] = 1e3 * seconds;
  return {{"compute", 1e3 * time.compute}, {"exposed", exposed}, {"bubble", 1e3 * time.bubble}, {"data", 1e3 * time.data}};
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
