// The plan of a run: the memory of each rank, byte for byte. --plan makes it without training, and every run writes it
// to OUT/plan.json, as the ranks have really allocated (runtime/planner/memory.cuh makes both).
//
// As JSON it is one object:
//
//   device       object: name; bytes, which a rank may use; reserve, bytes of these that are left to libraries; here:
//                is it the device of this machine? If not, libraries' workspaces follow formulas
//   steps        of the whole run; only in OUT/plan.json, which each start writes anew
//   fits         has the device room for every rank, and for the reserve?
//   ranks        list, an object for each rank:
//     rank         its number
//     place        object: its number among the ranks of tp, cp, dp and pp, and its island's
//     layers       of its pipeline stage, as text: "1 to 3, 7 to 9"
//     slots        pairs of micro-batch and chunk of layers that may wait for backward (extensions/pipeline/pipeline.h)
//     memory       object: bytes on the device, by category
//     total        all of them
//     host         object: bytes of pinned memory of the host, by category
//   step_ms, margin, tokens_per_s, mfu, cost, run    by --cluster or --ceilings, in a run by the device's name, too; null:
//                not known
//     margin       object: the shares of the time by which other runs were shorter and longer than their
//                  forecasts; runs, their source
//     cost         object: devices; dollars_per_hour of all, dollars_per_billion_tokens; and spot_ of both, or null
//     run          object: tokens; days, dollars, checkpoint_minutes, lost (to interruptions, a share); and spot_ of
//                  these. null: not known, or the run never ends
//   time         the parts of step_ms (runtime/planner/forecast.h), or null: object of milliseconds; communication has
//                total and exposed
//   limit        which part takes the most time, in a sentence, or null
#pragma once

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "gpt/shapes.h"
#include "kernels/device/bytes.h"
#include "runtime/planner/forecast.h"
#include "runtime/planner/rules.h"
#include "runtime/reports/report.h"

// The device of each rank. If it is not here, the workspaces of its libraries are planned by formulas.
struct PlannedDevice {
  std::string name;
  size_t bytes = 0, reserve = 0;
  bool is_here = true;
  size_t host_room = 0;  // bytes of its host's memory for a rank; 0: not known, or the device uses it itself

  // Room for a run: the reserve stays free on the device and on the host.
  size_t room() const { return bytes - std::min(bytes, reserve); }
  size_t room_on_host() const { return host_room ? host_room - std::min(host_room, reserve) : SIZE_MAX; }
};

struct RankPlan {
  int rank = 0;
  MeshPlace place = {};
  std::string layers;
  int slots = 1;
  std::vector<MemoryCategory> memory, host;

  size_t total() const { return total_of(memory); }
  size_t offloaded() const;  // bytes of the host's memory, by --offload
};

// The whole run.
struct PlannedRun {
  double parameters = 0, vocabulary = 2, tokens = 0;
  double seconds = 0;       // of training, which then determine the tokens; 0: they are given
  double save_seconds = 0;  // that training waits for a checkpoint; 0: by the bytes of a rank (runtime/planner/rules.md)

  // After `tokens` tokens: expected_loss, and no worse than guessing.
  double loss(double tokens) const;
};

// The price of devices, and how often they are interrupted.
struct Rent {
  double price = 0;  // of a device for an hour, dollars; 0: not known
  Saving saving = {};
};

// The time of a step and of the run on some devices, and the price.
struct PlannedTime {
  Forecast forecast;
  double devices = 1, tokens = 0;
  Rent demand = {}, spot = {};
  Margin margin = {};

  double device_hours(double tokens) const { return devices * tokens / forecast.tokens_per_s / 3600; }
  double days(const Rent& rent) const { return tokens / forecast.tokens_per_s / (1 - rent.saving.lost) / 86400; }
  double dollars(const Rent& rent) const { return days(rent) * 24 * devices * rent.price; }
};
PlannedTime planned_time(const StepOptions& step, const Cluster& cluster, const PlannedRun& run);

struct Plan {
  PlannedDevice device;
  std::vector<RankPlan> ranks;
  std::optional<PlannedTime> time = {};
  std::string advice = {};  // if it does not fit: the options that would help most
  size_t steps = 0;         // of the run; 0: it is not one

  const RankPlan& largest() const { return *std::ranges::max_element(ranks, {}, &RankPlan::total); }
  bool fits() const { return largest().total() <= device.room() && fits_host(); }
  // Do the offloaded arrays fit?
  bool fits_host() const {
    return std::ranges::all_of(ranks, [&](const RankPlan& rank) { return rank.offloaded() <= device.room_on_host(); });
  }
};

// The plan as JSON, with the keys of `time` from step_ms on.
std::string text_of(const Plan& plan);
nlohmann::ordered_json object_of(const PlannedTime& time);

// JSON as text, whatever bytes are in it, as in a command line.
std::string json_text(const nlohmann::ordered_json& object);

// The plan of one rank as text, for messages between ranks.
std::string text_of(const RankPlan& rank);
RankPlan rank_plan_of(const std::string& text);

// "weights 1.0 MiB, gradients 1.0 MiB, ...": the largest rank's. Stages of a pipeline differ: then it is a table
// with a row for each, of its largest rank.
std::string memory_text(const Plan& plan);

// A line: the rank that needs the most, and whether the device has room for that.
std::string fit_text(const Plan& plan);

// Some lines: the time of a step and of the run, the limit of a step, and the price.
std::string time_text(const PlannedTime& time, double tokens_per_step);

// Writes plan.json of a run. If the disk does not take it, the run says so and goes on.
void write_plan(const std::filesystem::path& out, const Plan& plan);

// ---- the forecast compared with the measurement

// Seconds of a step by kind of kernels, as they are measured and as they are forecast.
using KindSeconds = std::array<double, 3>;
inline constexpr const char* kind_names[] = {"products", "attention", "memory"};
KindSeconds kind_seconds(const std::vector<KernelTotal>& kernels);
KindSeconds kind_seconds(const Forecast& f);

// "forecast 812 ms, measured 861: products +31, communication +14, ...": the milliseconds by which a part of the step
// took longer than its forecast. Without a table of kernels, their kinds are one part: "computation".
std::string comparison_text(const Forecast& f, const MeasuredStep& measured);
