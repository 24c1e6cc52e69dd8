#include "runtime/planner/search.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <nlohmann/json.hpp>

#include "gpt/base/text.h"
#include "gpt/options.h"
#include "runtime/reports/console.h"

namespace {

// Schedules, each with its number of chunks. More than 8 of them shorten the bubble only a little, and send more
// messages.
std::vector<std::pair<const char*, int>> schedules_of(int stages, int layers) {
  if (stages == 1) return {{"1f1b", 1}};
  std::vector<std::pair<const char*, int>> all = {{"1f1b", 1}, {"gpipe", 1}, {"zb", 1}};
  for (int chunks = 2; chunks <= std::min(8, layers / stages); ++chunks) all.push_back({"interleaved", chunks});
  return all;
}

// Candidates that are kept, the smallest key first.
using Key = double (Candidate::*)() const;
bool belongs(const std::vector<Candidate>& kept, const Candidate& c, size_t most, Key key) {
  return kept.size() < most || (c.*key)() < (kept.back().*key)();
}
void keep(std::vector<Candidate>& kept, const Candidate& c, size_t most, Key key) {
  kept.insert(std::ranges::upper_bound(kept, (c.*key)(), {}, key), c);
  if (kept.size() > most) kept.pop_back();
}

}  // namespace

void for_each_candidate(const StepOptions& base, int ranks, const std::function<void(const StepOptions&)>& visit) {
  constexpr int most_split = 1024;  // --tp, --cp
  StepOptions s = base;
  const auto try_each_way = [&] {
    const int most_zero = s.mesh.dp * s.mesh.cp > 1 ? 3 : 0;
    for (const char* recompute : {"none", "gelu", "block"})  // higher levels of ZeRO refuse the same batches
      for (s.recompute = recompute, s.zero = s.compress_weights != "none"; s.zero <= most_zero && batch_problem(s).empty(); ++s.zero) visit(s);
  };
  const auto try_batches = [&] {
    if (s.global_batch % s.mesh.dp != 0) return;
    const std::vector<int> micro_batches = divisors(s.global_batch / s.mesh.dp, most_micro_batch);
    for (const auto& [schedule, chunks] : schedules_of(s.mesh.pp, s.shape.layers)) {
      s.pp_schedule = schedule, s.pp_chunks = chunks;
      for (const int micro_batch : micro_batches)
        if (s.micro_batch = micro_batch; shape_problem(s).empty()) try_each_way();
    }
  };
  for (const int tp : divisors(ranks, std::min(most_split, s.shape.heads)))
    for (const int cp : divisors(ranks / tp, most_split))
      for (const int pp : divisors(ranks / tp / cp, s.shape.layers))
        for (const char* method : {"ring", "ulysses"}) {
          s.mesh = {tp, cp, ranks / tp / cp / pp, pp};
          s.cp_method = method;
          if (cp > 1 || s.cp_method == "ring") try_batches();
        }
}

// Most candidates need no model to be built: their least memory is too much, or they take more time than those that are
// kept.
void search(SearchResult& result, StepOptions base, const Rented& rented, const PlannedRun& run, size_t room,
            const CandidateBytes& bytes_of, size_t most) {
  adapt(base, rented.cluster);
  const auto fits = [&](const StepOptions& step, size_t bytes) {
    if (bytes <= room) return true;
    if (result.too_large++ == 0 || bytes < result.smallest.bytes) result.smallest = {step, {}, bytes};
    return false;
  };
  const auto consider = [&](const StepOptions& step) {
    ++result.candidates;
    if (!fits(step, bytes_of.at_least(step))) return;
    Candidate c = {step, planned_time(step, rented.cluster, run)};
    const bool is_fast = belongs(result.fastest, c, most, &Candidate::seconds);
    if (!is_fast && !belongs(result.cheapest, c, most, &Candidate::device_hours)) return;
    c.bytes = bytes_of.exactly(step);
    if (!fits(step, c.bytes)) return;
    c.cluster = rented.cluster;
    keep(result.fastest, c, most, &Candidate::seconds);
    keep(result.cheapest, c, most, &Candidate::device_hours);
  };
  for_each_candidate(base, rented.ranks, [&](const StepOptions& step) {
    consider(step);
    if (rented.cluster.host_memory == 0 || step.offload != "none") return;
    for (StepOptions other = step; const char* offload : ways_to_offload)
      if (other.offload = offload; batch_problem(other).empty()) consider(other);
  });
}

std::vector<Rented> parts_of(const Cluster& cluster) {
  std::vector<Rented> parts;
  const int host = cluster.devices_per_host;
  for (const int devices : divisors(host, host - 1)) parts.push_back({with_devices(cluster, devices), devices});
  for (const int hosts : divisors(cluster.hosts, cluster.hosts))
    parts.push_back({with_devices(cluster, hosts * host), hosts * host});
  return parts;
}

std::string options_text(const StepOptions& s) {
  std::string text = concat("--global-batch ", s.global_batch, " --micro-batch ", s.micro_batch);
  const auto add = [&](const char* flag, const auto& value) { text += concat(' ', flag, ' ', value); };
  if (s.mesh.tp > 1) add("--tp", s.mesh.tp);
  if (s.mesh.cp > 1) add("--cp", s.mesh.cp), add("--cp-method", s.cp_method);
  if (s.mesh.pp > 1) add("--pp", s.mesh.pp), add("--pp-schedule", s.pp_schedule);
  if (s.pp_chunks > 1) add("--pp-chunks", s.pp_chunks);
  if (s.zero > 0) add("--zero", s.zero);
  if (s.recompute != "none") add("--recompute", s.recompute);
  if (s.offload != "none") add("--offload", s.offload);
  return text;
}

std::string table_of(const std::vector<Candidate>& candidates, size_t first) {
  std::vector<std::vector<std::string>> rows = {
      {"row", "cluster", "ranks", "ms a step", "margin %", "tokens/s", "MFU %", "memory", "hours/B", "dollars/B", "days",
       "dollars", "spot days", "dollars", ""}};
  const auto number = [](double x, int digits) { return std::isinf(x) ? "never" : formatted("%.*f", digits, x); };
  const auto priced = [&](const Rent& rent, double value, int digits) {
    return rent.price > 0 ? number(value, digits) : "?";
  };
  for (const Candidate& c : candidates) {
    const auto& [f, devices, tokens, demand, spot, margin] = c.time;
    rows.push_back({std::to_string(first++), c.cluster.name, std::to_string(c.step.mesh.ranks()), number(1e3 * f.seconds, 1),
                    formatted("%.0f +%.0f", 100 * margin.shorter, 100 * margin.longer), with_commas(f.tokens_per_s),
                    number(100 * f.mfu, 1), bytes_text(c.bytes), number(c.device_hours(), 2),
                    priced(demand, c.device_hours() * demand.price, 2), number(c.time.days(demand), 2),
                    priced(demand, c.time.dollars(demand), 0), priced(spot, c.time.days(spot), 2),
                    priced(spot, c.time.dollars(spot), 0), c.command});
  }
  return table_text(rows);
}

std::string nothing_fits_text(const SearchResult& result, const PlannedDevice& device) {
  const Candidate& c = result.smallest;
  if (result.too_large == 0)
    return "there is no way to train on this number of ranks: choose another number, or another --global-batch";
  return concat("none fits: the smallest, ", options_text(c.step), " on ", c.step.mesh.ranks(), " ranks, needs ",
                bytes_text(c.bytes), " on each, and ", bytes_text(device.reserve), " are left to libraries; ",
                device.name, " has ", bytes_text(device.bytes), ", ", bytes_text(c.bytes + device.reserve - device.bytes),
                " too little: take more ranks, or devices with more memory");
}

nlohmann::ordered_json objects_of(const std::vector<Candidate>& candidates) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Candidate& c : candidates) {
    const int ranks = c.step.mesh.ranks();
    all.push_back({{"cluster", c.cluster.name}, {"ranks", ranks}, {"command", c.command}, {"memory", c.bytes}});
    all.back().update(object_of(c.time));
    all.back()["device_hours_per_billion_tokens"] = c.device_hours();
  }
  return all;
}

std::string text_of(const SearchResult& result, double seconds, const PlannedDevice& device) {
  const auto& [fastest, cheapest, candidates, too_large, smallest] = result;
  nlohmann::ordered_json object = {{"candidates", candidates}, {"too_large", too_large}, {"seconds", seconds},
                                   {"fastest", objects_of(fastest)}, {"cheapest", objects_of(cheapest)}};
  if (fastest.empty()) object["problem"] = nothing_fits_text(result, device);
  return json_text(object);
}
