#include "planner/plan.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>

#include <nlohmann/json.hpp>

#include "processes/error.h"
#include "runtime/console.h"
#include "runtime/files.h"
#include "runtime/run_folder.h"

namespace {

using Object = nlohmann::ordered_json;

Object object_of(const std::vector<MemoryCategory>& categories) {
  Object object = Object::object();
  for (const auto& [name, bytes] : categories) object[name] = bytes;
  return object;
}

Object milliseconds(const Forecast& f) {
  const auto communication = [](const Forecast::Communication& c) { return Object{{"total", 1e3 * c.total}, {"exposed", 1e3 * c.exposed}}; };
  return {{"products", 1e3 * f.products}, {"attention", 1e3 * f.attention}, {"memory", 1e3 * f.memory},
          {"launches", 1e3 * f.launches}, {"bubble", 1e3 * f.bubble},       {"update", 1e3 * f.update},
          {"tp", communication(f.tp)},    {"cp", communication(f.cp)},      {"dp", communication(f.dp)},
          {"pp", communication(f.pp)}};
}

Object known(double value) { return value > 0 ? Object(value) : Object(); }

Object cost_of(const PlannedTime& time) {
  if (time.price == 0) return {};
  return {{"devices", time.devices},
          {"dollars_per_hour", time.dollars_per_hour(time.price)},
          {"dollars_per_billion_tokens", time.dollars_per_billion_tokens(time.price)},
          {"spot_dollars_per_hour", known(time.dollars_per_hour(time.spot_price))},
          {"spot_dollars_per_billion_tokens", known(time.dollars_per_billion_tokens(time.spot_price))}};
}

std::vector<MemoryCategory> categories_of(const Object& object) {
  std::vector<MemoryCategory> categories;
  for (const auto& [name, bytes] : object.items()) categories.push_back({name, bytes.get<size_t>()});
  return categories;
}

Object object_of(const RankPlan& rank) {
  const auto& [tp, cp, dp, pp] = rank.place;
  return {{"rank", rank.rank},
          {"place", {{"tp", tp}, {"cp", cp}, {"dp", dp}, {"pp", pp}}},
          {"layers", rank.layers},
          {"slots", rank.slots},
          {"memory", object_of(rank.memory)},
          {"total", rank.total()},
          {"host", object_of(rank.host)}};
}

// "weights 1.0 MiB, gradients 1.0 MiB"
std::string list_of(const std::vector<MemoryCategory>& categories) {
  std::string text;
  for (const auto& [name, bytes] : categories) text += (text.empty() ? "" : ", ") + name + " " + bytes_text(bytes);
  return text;
}

// The largest rank of each stage.
std::vector<RankPlan> largest_of_stages(const Plan& plan) {
  std::map<int, RankPlan> stages;
  for (const RankPlan& rank : plan.ranks) {
    const auto [stage, is_new] = stages.try_emplace(rank.place.pp, rank);
    if (!is_new && rank.total() > stage->second.total()) stage->second = rank;
  }
  std::vector<RankPlan> largest;
  for (const auto& [stage, rank] : stages) largest.push_back(rank);
  return largest;
}

std::string table_of(const std::vector<RankPlan>& stages) {
  std::ostringstream table;
  const auto column = [&](const std::string& title, const std::string& value, bool is_title) {
    table << std::setw(std::max(int(title.size()), 10) + 2) << (is_title ? title : value);  // 1023.9 MiB
  };
  const auto row = [&](const RankPlan& rank, bool is_title) {
    for (const auto& [name, bytes] : rank.memory) column(name, bytes_text(bytes), is_title);
    column("total", bytes_text(rank.total()), is_title);
    column("host", bytes_text(total_of(rank.host)), is_title);
    column("slots", std::to_string(rank.slots), is_title);
    table << "  " << (is_title ? "layers" : rank.layers);
  };
  table << "stage";
  row(stages.front(), true);
  for (const RankPlan& rank : stages) {
    table << "\n          " << std::left << std::setw(5) << rank.place.pp << std::right;
    row(rank, false);
  }
  return table.str();
}

}  // namespace

const RankPlan& Plan::largest() const { return *std::ranges::max_element(ranks, {}, &RankPlan::total); }

std::string text_of(const Plan& plan) {
  Object ranks = Object::array();
  for (const RankPlan& rank : plan.ranks) ranks.push_back(object_of(rank));
  const auto& [name, bytes, reserve, here] = plan.device;
  const Forecast* f = plan.time ? &plan.time->forecast : nullptr;
  const Object object = {{"device", {{"name", name}, {"bytes", bytes}, {"reserve", reserve}, {"here", here}}},
                         {"fits", plan.fits()},
                         {"ranks", ranks},
                         {"step_ms", f ? Object(1e3 * f->seconds) : Object()},
                         {"tokens_per_s", f ? Object(f->tokens_per_s) : Object()},
                         {"mfu", f ? known(f->mfu) : Object()},
                         {"cost", f ? cost_of(*plan.time) : Object()},
                         {"time", f ? milliseconds(*f) : Object()},
                         {"limit", f ? Object(f->explanation()) : Object()}};
  return object.dump();
}

std::string text_of(const RankPlan& rank) { return object_of(rank).dump(); }

RankPlan rank_plan_of(const std::string& text) {
  const Object object = Object::parse(text), &place = object["place"];
  return {object["rank"], {place["tp"], place["cp"], place["dp"], place["pp"]}, object["layers"], object["slots"],
          categories_of(object["memory"]), categories_of(object["host"])};
}

std::string memory_text(const Plan& plan) {
  const std::vector<RankPlan> stages = largest_of_stages(plan);
  if (stages.size() > 1) return table_of(stages);
  const RankPlan& rank = stages.front();
  return list_of(rank.memory) + ", total " + bytes_text(rank.total()) + "; host memory: " + list_of(rank.host);
}

std::string fit_text(const Plan& plan) {
  const auto& [name, bytes, reserve, here] = plan.device;
  const RankPlan& rank = plan.largest();
  std::string needed = "rank " + std::to_string(rank.rank) + " needs the most, " + bytes_text(rank.total()) + ", and " +
                             bytes_text(reserve) + " are left to libraries; " + name + " has " + bytes_text(bytes) + " free";
  if (!here) needed += " (workspaces of libraries by formulas)";
  if (plan.fits()) return "yes: " + needed;
  return "no: " + needed + ", " + bytes_text(rank.total() + reserve - bytes) + " too little" + plan.advice;
}

PlannedTime planned_time(const PlannedStep& step, const Cluster& c) {
  return {forecast(step, c), double(step.mesh.ranks()) / c.ranks_per_device, c.price, c.spot_price};
}

std::string time_text(const PlannedTime& time) {
  const Forecast& f = time.forecast;
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << "time      " << 1e3 * f.seconds << " ms a step, "
       << with_commas(f.tokens_per_s) << " tokens/s";
  if (f.mfu > 0) text << ", MFU " << 100 * f.mfu << " %";
  text << "\nlimit     " << f.explanation();
  const auto cost = [&](double price) {
    text << std::setprecision(2) << time.dollars_per_hour(price) << " dollars an hour, " << time.dollars_per_billion_tokens(price)
         << " for a billion tokens";
  };
  if (time.price == 0) return text.str();
  text << "\ncost      ";
  cost(time.price);
  if (time.spot_price > 0) text << "; spot ", cost(time.spot_price);
  return text.str();
}

void write_plan(const std::filesystem::path& out, const Plan& plan) {
  const std::string problem = attempt([&] { replace_file(plan_path(out), text_of(plan) + "\n"); });
  if (!problem.empty()) print_error("the run's plan could not be written, training goes on: " + one_line(problem));
}
