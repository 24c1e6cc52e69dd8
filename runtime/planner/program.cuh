// --plan, as the program does it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention/library_attention.h"
#include "runtime/planner/memory.cuh"
#include "runtime/planner/options.h"
#include "runtime/planner/search.h"
#include "runtime/reports/telemetry.cuh"

// Fails if --fp8 asks for products that the device has not.
inline void require_fp8(const StepOptions& o, const Device& device) {
  if (o.fp8 && device.fp8 == 0) usage_error("--fp8: ", device.name, " has no products in eight bits: leave it out");
  if (o.fp8_scale == "tiles" && !device.fp8_tiles)
    usage_error("--fp8-scale tiles: ", device.name, " does not multiply tiles, as Hopper does: leave it out");
}

// The device of a cluster, which is not here.
inline PlannedDevice device_of(const Cluster& cluster) {
  const bool is_cpu = cluster.is_shared();  // without libraries that have workspaces
  return {cluster.device.name, size_t(cluster.device.memory) / size_t(cluster.ranks_per_device),
          is_cpu ? host_reserve : gpu_reserve, is_cpu, size_t(cluster.host_memory / cluster.ranks_per_host())};
}

// Known rates of the devices of these ranks: by --cluster, by --ceilings or by their name. None: nothing is known.
inline std::optional<Cluster> known_cluster(const Options& o, const std::string& device, int ranks) {
  if (!o.of<PlanOptions>().cluster.empty()) return with_devices(find_cluster(o.of<PlanOptions>().cluster), ranks);
  const std::string& ceilings = o.of<ReportOptions>().ceilings;
  if (!ceilings.empty()) return cluster_of(load_ceilings(ceilings, o.dtype, device), ranks);
  std::optional<Cluster> known = cluster_of_device(device, ranks);
  if (known) known->host_memory = double(host_memory_left());
  return known;
}

// Advice if a plan does not fit: the change of one option that saves the most.
inline std::string advice(const Options& o, const Plan& plan) {
  const size_t now = plan.largest().total();
  size_t least = now;
  std::string best;
  Options changed = o;
  const auto consider = [&](const char* flag, auto& option, const auto& value) {
    option = value;
    if (attempt([&] { complete_options(changed, o.mesh.ranks()), refuse(shape_problem(changed)); }).empty()) {
      const size_t bytes = largest_bytes(changed, plan.device.is_here, SIZE_MAX, plan.device.room_on_host());
      if (bytes < least) least = bytes, best = concat(flag, ' ', value);
    }
    changed = o;
  };
  if (o.micro_batch % 2 == 0) consider("--micro-batch", changed.micro_batch, o.micro_batch / 2);
  for (const char* kind : {"gelu", "block"}) consider("--recompute", changed.recompute, kind);
  for (const char* what : ways_to_offload)
    if (plan.device.host_room > 0) consider("--offload", changed.offload, what);
  for (int stage = o.zero + 1; stage <= 3; ++stage) consider("--zero", changed.zero, stage);
  consider("--tp", changed.mesh.tp, 2 * o.mesh.tp);
  consider("--pp", changed.mesh.pp, 2 * o.mesh.pp);
  if (best.empty()) return "; more ranks would help";
  const char* fits = least <= plan.device.room() ? ", and it fits" : ", and not enough";
  return "; " + best + " would help most, by " + bytes_text(now - least) + fits;
}

// The run of these options: their steps, or --train-minutes. A plan without either has tokens that suit the model.
inline PlannedRun planned_run(const Options& o) {
  const double parameters = double(TensorList(o.shape).parameters());
  const bool by_steps = !o.plan || o.steps_given;
  const double tokens = by_steps ? double(o.schedule.steps) * o.tokens() : suitable_tokens(parameters);
  return {parameters, double(o.shape.vocabulary), tokens, 60 * o.train_minutes, o.of<PlanOptions>().checkpoint_seconds};
}

// Advice if the number of ranks determines the samples of a step, as a line; else "".
inline std::string batch_hint_of(const Options& o, const PlannedRun& run) {
  if (!o.samples_alone || o.global_batch == o.samples_alone) return "";
  return batch_hint(o.global_batch, o.samples_alone, o.seq_len, run.loss(run.tokens), o.schedule.lr) + '\n';
}

// ---- --mesh auto

// The samples of a step, which are the same on all meshes: the program's default for ranks that all train on different
// ones.
inline void fix_batch(Options& o, int ranks) {
  if (!o.global_batch) o.samples_alone = o.micro_batch, o.global_batch = o.micro_batch * ranks;
  o.micro_batch = 1;
  if (o.offloads("activations")) o.recompute = "block";  // the search finds no other, and tries all with it
}

// Searches for the ranks of each part of a cluster. To plan attention by a library on the device takes too long for a
// search: its workspace is estimated by the formula at first.
inline SearchResult search_meshes(const Options& o, const PlannedDevice& device, const std::vector<Rented>& parts,
                                  size_t most = 10) {
  const bool has_plans = device.is_here && has_library_attention;
  const auto bytes = [&](StepOptions s, bool is_here) {
    const int enough = 4 * s.mesh.pp;  // micro-batches: with more of them, a stage but gpipe's holds no more at a time
    if (s.pp_schedule != "gpipe") s.global_batch = s.micro_batch * s.mesh.dp * std::min(s.micro_batches(), enough);
    return largest_bytes(options_with(o, s), is_here, device.room(), device.room_on_host());
  };
  const auto bytes_at_first = [&](const StepOptions& s) { return bytes(s, device.is_here && !has_plans); };
  SearchResult result;
  const PlannedRun run = planned_run(o);
  for (const Rented& part : parts) search(result, o, part, run, device.room(), {bytes_at_first, least_bytes}, most);
  if (result.fastest.empty() && result.too_large) result.smallest.bytes = bytes_at_first(result.smallest.step);
  if (has_plans)
    for (std::vector<Candidate>* list : {&result.fastest, &result.cheapest}) {
      for (Candidate& c : *list) c.bytes = bytes(c.step, true);
      std::erase_if(*list, [&](const Candidate& c) { return c.bytes > device.room(); });
    }
  return result;
}

// The command line that trains with a candidate: the words of this one, without the plan's words, and the same number
// of steps.
inline std::string command_of(const Candidate& c, const std::vector<std::string>& words) {
  const auto is_length = [](const std::string& word) {
    return word.starts_with("--steps") || word.starts_with("--train-minutes");
  };
  const double steps = std::ceil(c.time.tokens / c.step.tokens());
  return (c.step.mesh.ranks() > 1 ? "mpirun -np " + std::to_string(c.step.mesh.ranks()) + ' ' : "") +
         command_without({"--plan", "--json", "--mesh", "--cluster", "--ranks", "--ceilings", "--global-batch",
                          "--checkpoint-seconds", "--days", "--budget", "--recipe", "--row", "--micro-batch", "--tp",
                          "--cp", "--cp-method", "--pp", "--pp-schedule", "--pp-chunks", "--zero", "--recompute", "--offload"}, words) +
         ' ' + options_text(c.step) +
         (std::ranges::any_of(words, is_length) ? "" : " --steps " + std::to_string(std::llround(steps)));
}

// Returns the rows of its tables.
inline std::vector<Candidate> print_search(const Options& o, const PlannedDevice& device, const std::vector<Rented>& parts) {
  const Clock::time_point begin = Clock::now();
  SearchResult result = search_meshes(o, device, parts);
  const double seconds = seconds_since(begin);
  for (std::vector<Candidate>* list : {&result.fastest, &result.cheapest})
    for (Candidate& c : *list) c.command = command_of(c, o.words);
  std::vector<Candidate> rows = result.fastest;
  if (parts.size() > 1) rows.insert(rows.end(), result.cheapest.begin(), result.cheapest.end());
  if (o.of<PlanOptions>().json) return print_line(text_of(result, seconds, device)), rows;
  describe_model(o);
  std::printf("%s", batch_hint_of(o, planned_run(o)).c_str());
  std::printf("searched  %s candidates in %.1f s; %s were left out as too large for %s\n",
              with_commas(double(result.candidates)).c_str(), seconds, with_commas(double(result.too_large)).c_str(),
              device.name.c_str());
  if (result.fastest.empty()) std::printf("fits      %s\n", nothing_fits_text(result, device).c_str());
  else std::printf("fastest   %s\n", table_of(result.fastest).c_str());
  if (parts.size() > 1 && !result.cheapest.empty()) std::printf("cheapest  %s\n", table_of(result.cheapest, result.fastest.size() + 1).c_str());
  return rows;
}

// Chooses the fastest mesh for the ranks that were started, the same on all. device_taken: the device that this rank
// has taken. Collective.
inline void choose_mesh(Options& o, Ranks& ranks, int device_taken) {
  fix_batch(o, ranks.size());
  decide_shape(o, o.init, false, open_data(o));
  const std::string name = device_name(device_taken);
  PlannedDevice device = this_device(name, ranks.size());
  for (size_t* bytes : {&device.bytes, &device.host_room})  // rank 0's
    *bytes = std::stoull(ranks.all_gather(std::to_string(*bytes))[0]);
  const std::optional<Cluster> cluster = known_cluster(o, name, ranks.size());
  if (!cluster)
    usage_error("--mesh auto: no rates of ", name, " are known: measure them with dev/ceilings.cu, and give --ceilings");
  const SearchResult result = search_meshes(o, device, {{*cluster, ranks.size()}}, 1);
  if (result.fastest.empty()) fail("--mesh auto: ", nothing_fits_text(result, device));
  const Candidate& best = result.fastest[0];
  o = options_with(o, best.step);
  std::printf("auto      %s: %.1f ms a step by forecast (%s), the fastest of %s candidates\n",
              options_text(best.step).c_str(), 1e3 * best.time.forecast.seconds, best.time.margin.text().c_str(),
              with_commas(double(result.candidates)).c_str());
}

// The gain by --fp8, by forecast; empty: it can't be used or the device has no gain.
inline std::string fp8_text(const Options& o, const Cluster& cluster) {
  Options other = o;
  other.fp8 = !o.fp8;
  if (o.dtype != "bf16" || cluster.device.fp8 <= 1 || !shape_problem(other).empty()) return "";
  const double with = forecast(o.fp8 ? o : other, cluster).seconds, without = forecast(o.fp8 ? other : o, cluster).seconds;
  return formatted("fp8       %.1f ms a step with --fp8, %.1f without: it %s (%.2f times as fast, by forecast)", 1e3 * with,
                   1e3 * without, with < 0.98 * without ? "pays" : "does not pay", without / with);
}

// Prints the plan of training with these options, and returns the rows of its table; without --mesh auto itself, if it
// fits. ranks: those that were started.
inline std::vector<Candidate> print_plan(Options& o, int ranks) {
  const PlanOptions& wanted = o.of<PlanOptions>();
  const bool searches = !wanted.mesh.empty();
  std::optional<Cluster> cluster;
  if (!wanted.cluster.empty()) cluster = find_cluster(wanted.cluster);
  if (wanted.ranks || cluster) ranks = wanted.ranks ? wanted.ranks : cluster->devices();
  if (cluster) cluster = with_devices(*cluster, ranks);
  else require_device();
  if (searches) fix_batch(o, ranks);
  complete_options(o, searches ? 1 : ranks);
  decide_shape(o, o.init, false, open_data(o));
  const PlannedDevice device = cluster ? device_of(*cluster) : this_device(device_name(), ranks);
  if (cluster) require_fp8(o, cluster->device);
  const bool by_parts = cluster && !wanted.ranks;
  if (!cluster) cluster = known_cluster(o, device.name, ranks);
  if (cluster) adapt(o, *cluster);
  if (searches && !cluster)
    usage_error("--plan --mesh auto compares times: give --cluster, or --ceilings of this device (dev/ceilings.cu)");
  if (searches) return print_search(o, device, by_parts ? parts_of(*cluster) : std::vector<Rented>{{*cluster, ranks}});
  Plan plan = plan_of_memory(o, device);
  const PlannedRun run = planned_run(o);
  if (cluster) plan.time = planned_time(o, *cluster, run);
  if (!plan.fits()) plan.advice = advice(o, plan);
  if (!cluster) cluster = Cluster{"this machine", Device{device.name}, ranks};
  Candidate row = {o, plan.time.value_or(PlannedTime{{}, 1, run.tokens}), 0, *cluster};
  row.command = command_of(row, o.words);
  const std::vector<Candidate> rows(plan.fits(), row);
  if (wanted.json) return print_line(text_of(plan)), rows;
  describe_model(o);
  describe_mesh(o);
  describe_batch(o);
  std::printf("%s", batch_hint_of(o, run).c_str());
  std::printf("memory    %s\nfits      %s\n", memory_text(plan).c_str(), fit_text(plan).c_str());
  if (plan.time) print_line(time_text(*plan.time, o.tokens()));
  if (const std::string text = plan.time ? fp8_text(o, *cluster) : ""; !text.empty()) print_line(text);
  return rows;
}
