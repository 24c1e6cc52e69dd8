#include "runtime/planner/plan.h"

#include <cmath>
#include <iomanip>
#include <map>
#include <sstream>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "runtime/checkpoints/checkpoint_writer.h"
#include "runtime/checkpoints/run_folder.h"
#include "runtime/reports/console.h"

namespace {

using Object = nlohmann::ordered_json;

Object object_of(const std::vector<MemoryCategory>& categories) {
  Object object = Object::object();
  for (const auto& [name, bytes] : categories) object[name] = bytes;
  return object;
}

Object milliseconds(const Forecast& f) {
  const auto communication = [](const Forecast::Communication& c) {
    return Object{{"total", 1e3 * c.total}, {"exposed", 1e3 * c.exposed}};
  };
  return {{"products", 1e3 * f.products}, {"attention", 1e3 * f.attention}, {"memory", 1e3 * f.memory},
          {"launches", 1e3 * f.launches}, {"bubble", 1e3 * f.bubble},       {"update", 1e3 * f.update},
          {"tp", communication(f.tp)},    {"cp", communication(f.cp)},      {"dp", communication(f.dp)},
          {"pp", communication(f.pp)},    {"islands", communication(f.islands)}, {"offload", communication(f.offload)}};
}

Object known(double value) { return value > 0 ? Object(value) : Object(); }

// Adds a value for each rent, on demand and spot (spot_KEY); null: the rent has no price.
void add_rents(Object& object, const PlannedTime& time, const std::string& key, const auto& value) {
  object[key] = known(value(time.demand));
  object["spot_" + key] = time.spot.price > 0 ? known(value(time.spot)) : Object();
}

Object cost_of(const PlannedTime& time) {
  if (time.demand.price == 0 && time.spot.price == 0) return {};
  Object object = {{"devices", time.devices}};
  add_rents(object, time, "dollars_per_hour", [&](const Rent& rent) { return time.devices * rent.price; });
  add_rents(object, time, "dollars_per_billion_tokens", [&](const Rent& rent) { return time.device_hours(1e9) * rent.price; });
  return object;
}

Object run_of(const PlannedTime& time) {
  Object object = {{"tokens", time.tokens}};
  add_rents(object, time, "days", [&](const Rent& rent) { return time.days(rent); });
  add_rents(object, time, "dollars", [&](const Rent& rent) { return time.dollars(rent); });
  add_rents(object, time, "checkpoint_minutes", [](const Rent& rent) { return rent.saving.interval / 60; });
  add_rents(object, time, "lost", [](const Rent& rent) { return rent.saving.lost; });
  return object;
}

std::vector<MemoryCategory> categories_of(const Object& object) {
  std::vector<MemoryCategory> categories;
  for (const auto& [name, bytes] : object.items()) categories.push_back({name, bytes.get<size_t>()});
  return categories;
}

Object object_of(const RankPlan& rank) {
  const auto& [tp, cp, dp, pp, island] = rank.place;
  return {{"rank", rank.rank},
          {"place", {{"tp", tp}, {"cp", cp}, {"dp", dp}, {"pp", pp}, {"island", island}}},
          {"layers", rank.layers},
          {"slots", rank.slots},
          {"memory", object_of(rank.memory)},
          {"total", rank.total()},
          {"host", object_of(rank.host)}};
}

// The largest rank of each stage.
std::map<int, RankPlan> largest_of_stages(const Plan& plan) {
  std::map<int, RankPlan> stages;
  for (const RankPlan& rank : plan.ranks) {
    RankPlan& largest = stages.try_emplace(rank.place.pp, rank).first->second;
    if (rank.total() > largest.total()) largest = rank;
  }
  return stages;
}

std::string table_of(const std::map<int, RankPlan>& stages) {
  std::vector<std::vector<std::string>> rows = {{"stage"}};
  for (const auto& [name, bytes] : stages.begin()->second.memory) rows[0].push_back(name);
  rows[0].insert(rows[0].end(), {"total", "host", "slots", "layers"});
  for (const auto& [stage, rank] : stages) {
    rows.push_back({std::to_string(stage)});
    for (const auto& [name, bytes] : rank.memory) rows.back().push_back(bytes_text(bytes));
    rows.back().insert(rows.back().end(), {bytes_text(rank.total()), bytes_text(total_of(rank.host)),
                                           std::to_string(rank.slots), rank.layers});
  }
  return table_text(rows);
}

}  // namespace

size_t RankPlan::offloaded() const {
  size_t bytes = 0;
  for (const auto& [name, size] : host) bytes += name == "optimizer" || name == "activations" || name == "gradients" ? size : 0;
  return bytes;
}

std::string text_of(const Plan& plan) {
  Object ranks = Object::array();
  for (const RankPlan& rank : plan.ranks) ranks.push_back(object_of(rank));
  const auto& [name, bytes, reserve, here, host_room] = plan.device;
  Object object = {{"device", {{"name", name}, {"bytes", bytes}, {"reserve", reserve}, {"here", here}}},
                   {"fits", plan.fits()},
                   {"ranks", ranks}};
  if (plan.steps > 0) object["steps"] = plan.steps;
  if (plan.time) object.update(object_of(*plan.time));
  else
    for (const char* unknown : {"step_ms", "margin", "tokens_per_s", "mfu", "cost", "run", "time", "limit"})
      object[unknown] = nullptr;
  return object.dump();
}

std::string json_text(const Object& object) {
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Object object_of(const PlannedTime& time) {
  const Forecast& f = time.forecast;
  const auto& [shorter, longer, runs] = time.margin;
  return {{"step_ms", 1e3 * f.seconds}, {"margin", {{"shorter", shorter}, {"longer", longer}, {"runs", runs}}},
          {"tokens_per_s", f.tokens_per_s}, {"mfu", known(f.mfu)}, {"cost", cost_of(time)},
          {"run", run_of(time)}, {"time", milliseconds(f)}, {"limit", f.explanation()}};
}

std::string text_of(const RankPlan& rank) { return object_of(rank).dump(); }

RankPlan rank_plan_of(const std::string& text) {
  const Object object = Object::parse(text), &place = object["place"];
  return {object["rank"], {place["tp"], place["cp"], place["dp"], place["pp"], place["island"]}, object["layers"], object["slots"],
          categories_of(object["memory"]), categories_of(object["host"])};
}

std::string memory_text(const Plan& plan) {
  const std::map<int, RankPlan> stages = largest_of_stages(plan);
  if (stages.size() > 1) return table_of(stages);
  const RankPlan& rank = stages.begin()->second;
  return text_of(rank.memory) + ", total " + bytes_text(rank.total()) + "; host memory: " + text_of(rank.host);
}

std::string fit_text(const Plan& plan) {
  const auto& [name, bytes, reserve, here, host_room] = plan.device;
  const RankPlan& rank = plan.largest();
  if (!plan.fits_host())
    return concat("no: --offload takes ", bytes_text(rank.offloaded()), " of the host's memory for a rank, which has ",
                  bytes_text(host_room), ", of which ", bytes_text(reserve),
                  " stay free: take more ranks with --zero, --moments bf16, or less --offload");
  const std::string needed = concat("rank ", rank.rank, " needs the most, ", bytes_text(rank.total()), ", and ",
                                    bytes_text(reserve), " are left to libraries; ", name, " has ", bytes_text(bytes),
                                    " free", here ? "" : " (workspaces of libraries by formulas)");
  if (plan.fits()) return "yes: " + needed;
  return "no: " + needed + ", " + bytes_text(rank.total() + reserve - bytes) + " too little" + plan.advice;
}

PlannedTime planned_time(const StepOptions& step, const Cluster& c, const PlannedRun& run) {
  const double ranks = step.mesh.ranks(), hosts = std::ceil(ranks / c.ranks_per_host());
  const double save = run.save_seconds > 0 ? run.save_seconds : 12 * run.parameters / ranks / snapshot_rate;
  const Forecast f = forecast(step, c);
  const double tokens = run.seconds > 0 ? run.seconds * f.tokens_per_s : run.tokens;
  const auto rent = [&](double price, double hours) {
    return Rent{price, saving_for(save, hours * 3600 / hosts, tokens / f.tokens_per_s)};
  };
  return {f, ranks / c.ranks_per_device, tokens, rent(c.price, c.hours), rent(c.spot_price, c.spot_hours), c.device.margin};
}

double PlannedRun::loss(double tokens) const { return std::min(expected_loss(parameters, tokens), std::log(vocabulary)); }

std::string time_text(const PlannedTime& time, double tokens_per_step) {
  const Forecast& f = time.forecast;
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << "time      " << 1e3 * f.seconds << " ms a step (" << time.margin.text()
       << "), " << with_commas(f.tokens_per_s) << " tokens/s";
  if (f.mfu > 0) text << ", MFU " << 100 * f.mfu << " %";
  text << "\nlimit     " << f.explanation() << "\nrun       " << with_commas(time.tokens) << " tokens";
  for (const auto& [name, rent] : {std::pair("", time.demand), {"spot: ", time.spot}}) {
    if (*name && !rent.price) continue;
    text << (*name ? "\n          " : ": ") << name;
    if (rent.saving.lost == 1) {
      text << "saving and restarting would take all of the time";
      continue;
    }
    const Margin& margin = time.margin;
    const double days = time.days(rent), dollars = time.dollars(rent);
    text << std::setprecision(2) << days << " days (" << margin.least(days) << " to " << margin.most(days)
         << "), " << 100 * rent.saving.lost << " % of them lost to interruptions with --checkpoint-every "
         << std::max(1ll, std::llround(rent.saving.interval * f.tokens_per_s / tokens_per_step));
    if (rent.price)
      text << "; " << with_commas(dollars) << " dollars (" << with_commas(margin.least(dollars)) << " to "
           << with_commas(margin.most(dollars)) << "), " << time.devices * rent.price << " an hour, "
           << time.device_hours(1e9) * rent.price << " for a billion tokens";
  }
  return text.str();
}

void write_plan(const std::filesystem::path& out, const Plan& plan) {
  const std::string problem = attempt([&] { replace_file(plan_path(out), text_of(plan) + "\n"); });
  if (!problem.empty())
    print_error("the run's plan could not be written, training goes on: " + one_line(problem) + ": check the folder and its space");
}

KindSeconds kind_seconds(const std::vector<KernelTotal>& kernels) {
  KindSeconds seconds = {};
  for (const KernelTotal& kernel : kernels) {  // launchers' names
    const auto has = [&](const char* part) { return kernel.name.find(part) != std::string::npos; };
    if (has("all_") || has("scatter") || has("broadcast") || has("send") || has("receive") || has("offload")) continue;  // no kernel
    const bool is_attention = has("attention") || has("ring_") || has("_keys") || has("_queries") || has("heads");
    seconds[has("matmul") ? 0 : is_attention ? 1 : 2] += kernel.milliseconds / 1e3;
  }
  return seconds;
}

KindSeconds kind_seconds(const Forecast& f) { return {f.products, f.attention, f.memory + f.update}; }

std::string comparison_text(const Forecast& f, const MeasuredStep& measured) {
  if (measured.seconds == 0) return formatted("forecast %.4g ms; a start's first steps are not measured", 1e3 * f.seconds);
  std::string text = formatted("forecast %.4g ms, measured %.4g:", 1e3 * f.seconds, 1e3 * measured.seconds);
  double left = measured.seconds - f.seconds;
  const auto add = [&](const char* part, double difference, const char* end = ",") {
    text += formatted(" %s %+.3g%s", part, std::round(1e5 * difference) / 100 + 0.0, end);  // not -0
    left -= difference;
  };
  const KindSeconds took = kind_seconds(measured.kernels), expected = kind_seconds(f);
  for (size_t kind = 0; kind < took.size() && !measured.kernels.empty(); ++kind) add(kind_names[kind], took[kind] - expected[kind]);
  const double waits = f.tp.exposed + f.cp.exposed + f.dp.exposed + f.islands.exposed + f.bubble;  // the bubble has pp's messages
  if (waits > 0) add(f.bubble > 0 ? "communication and bubble" : "communication", measured.exposed - waits);
  add(measured.kernels.empty() ? "computation" : "launches", left, "");
  return text;
}
