#include "runtime/monitor/monitor.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <limits>

#include <pthread.h>

#include "gpt/base/error.h"
#include "gpt/base/text.h"

using Json = nlohmann::ordered_json;

namespace {

constexpr double patience_s = 5;  // rank 0 waits for the notes of the others this long

double seconds_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return double(time.tv_sec) + 1e-3 * double(time.tv_nsec / 1'000'000);
}

// Rounds all floating-point numbers to 6 significant digits, which dump() then prints.
void round_floats(Json& value) {
  if (value.is_number_float()) value = std::atof(formatted("%.6g", value.get<double>()).c_str());
  if (value.is_structured())
    for (Json& element : value) round_floats(element);
}

}  // namespace

// ---- outliers

std::vector<std::string> Outliers::find(const Json& look, double now) {
  found_.clear();
  for (const Json& host : look["hosts"]) {
    const double rate = host.value("swap_bytes_per_s", 0.);
    consider(host, "swaps", rate > swapping_bytes_per_s,
             formatted("swaps %.1f MB/s: its memory is too small for what runs on it", rate / 1e6), looks_to_swap);
  }
  find_slow(look["ranks"]);
  for (const Json& rank : look["ranks"]) judge_gpu(rank), find_idle(rank, now);
  std::vector<std::string> texts;
  for (const auto& [text, whom] : found_) {
    std::vector<int> ranks;
    std::vector<std::string> hosts;
    for (const Json& one : whom) ranks.push_back(one.value("rank", -1)), hosts.push_back(one["host"]);
    const bool are_hosts = ranks[0] < 0;
    const std::string who = are_hosts ? (hosts.size() > 1 ? "hosts " : "host ") + joined(hosts) : rank_list(ranks);
    texts.push_back(who + (are_hosts || ranks.size() > 1 ? ": " : " (" + hosts[0] + "): ") + text);
  }
  return texts;
}

// Adds the text if `is_so` in this look and in the looks before it (`looks` in all), the first time only.
void Outliers::consider(const Json& rank, const char* kind, bool is_so, const std::string& text, int looks) {
  int& count = in_a_row_[rank.value("rank", Json()).dump() + rank["host"].get<std::string>() + kind];
  if (count > looks) return;  // it has been named
  count = is_so ? count + 1 : 0;
  if (count == looks) found_[text].push_back(rank), ++count;
}

void Outliers::find_slow(const Json& ranks) {
  std::map<int, std::vector<double>> stages;
  const auto stage_of = [&](const Json& rank) { return rank["rank"].get<int>() / ranks_of_a_stage_; };
  for (const Json& rank : ranks)
    if (rank.contains("work_ms")) stages[stage_of(rank)].push_back(rank["work_ms"]);
  for (auto& [stage, all] : stages) std::ranges::sort(all);
  for (const Json& rank : ranks) {
    if (!rank.contains("work_ms")) continue;
    const std::vector<double>& all = stages[stage_of(rank)];
    const double mine = rank["work_ms"], median = all[(all.size() - 1) / 2];  // of two ranks the faster one
    consider(rank, "slow", mine > slow * median, formatted("slow: its own work takes %.1f ms a step, %.2f times the median of "
             "%.1f ms: the others wait for it", mine, mine / median, median), looks_to_be_slow);
  }
}

void Outliers::judge_gpu(const Json& rank) {
  consider(rank, "problem", rank.contains("problem"), rank.value("problem", ""));
  if (!rank.contains("gpu")) return;
  const Json& gpu = rank["gpu"];
  consider(rank, "lost", gpu.is_null(), "NVML has lost the GPU: the kernel's log (dmesg) has the Xid; restart the host");
  if (gpu.is_null()) return;
  const double degrees = gpu.value("temperature_c", 0.), slowdown = gpu.value("slowdown_c", 1e9);
  const std::string temperature = gpu.contains("temperature_c") ? formatted("GPU at %.0f °C, ", degrees) : "GPU: ";
  consider(rank, "hot", degrees >= slowdown - hot_margin_c, temperature + formatted("slows down at %.0f", slowdown));
  std::vector<std::string> reasons = gpu.value("throttled", std::vector<std::string>());
  std::erase(reasons, "power");  // at its limit of power a busy GPU is as fast as it should be
  consider(rank, "throttled", !reasons.empty(), temperature + "clocks lowered by " + joined(reasons));
}

// A GPU is idle by its utilisation; a rank without a GPU is idle if it ends no steps and takes no processor time.
void Outliers::find_idle(const Json& rank, double now) {
  const Json gpu = rank.value("gpu", Json());
  const bool has_share = gpu.is_object() && gpu.contains("utilisation");
  const bool is_idle = has_share ? gpu["utilisation"] < idle_gpu : !rank.contains("step_ms") && rank.value("cpu", 1.) < idle_cpu;
  double& busy = busy_.try_emplace(rank["rank"], now).first->second;
  if (!is_idle) busy = now;
  consider(rank, "idle", now - busy >= idle_s, formatted("device idle for %.0f s: ", now - busy) +
                                                   rank.value("waits_for", "in no collective: does it wait for a disk?"));
}

// ---- the monitor

Monitor::Monitor(Control& control, MonitorOptions options)
    : control_(control), options_(std::move(options)), outliers_(options_.ranks_of_a_stage) {
  if (options_.every_s <= 0) return;
  if (!options_.path.empty()) log_.emplace(options_.path, std::numeric_limits<size_t>::max());
  for (int rank = 0; rank < control.rank(); ++rank) reads_host_ &= control.host(rank) != control.host(control.rank());
  thread_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

void Monitor::add_step(size_t step, double seconds, std::optional<double> waited_s) {
  const std::lock_guard lock(mutex_);
  ++steps_.count, steps_.seconds += seconds;
  if (waited_s) ++steps_.timed, steps_.work_s += seconds - *waited_s;
  if (step_.exchange(step) == 0) changed_.notify_all();
}

void Monitor::finish() {
  has_ended_ = true;
  thread_ = {};  // asks it to stop, and waits for that
}

// Looks are due at fixed times after the first step, so that all ranks take the same ones together.
void Monitor::watch(const std::stop_token& stop) {
  using Clock = std::chrono::steady_clock;
  pthread_setname_np(pthread_self(), "monitor");
  const auto every = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::max(options_.every_s, 1e-3)));
  Clock::time_point due = Clock::now();
  const auto wait = [&](const auto& is_early) {
    due += every * (1 + std::max<long>(0, (Clock::now() - due) / every));  // leaves out looks that are overdue
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, stop, due, is_early);
  };
  const std::string problem = attempt([&] {
    if (!options_.pci_bus_id.empty() || std::getenv("GPT_NVML")) nvml_.emplace(options_.pci_bus_id);
    wait([&] { return step_ > 0; });
    due = Clock::now();
    for (bool is_last = false; has_ended_ || !stop.stop_requested(); is_last = stop.stop_requested()) {
      control_.send_note(note());
      if (control_.rank() == 0) write(control_.take_notes(patience_s));
      if (is_last) return;
      wait([] { return false; });
    }
  });
  if (!problem.empty()) print_error("the monitor ends, training goes on: " + one_line(problem));
}

// This rank's part of a line: {"rank", "host"}, objects.
std::string Monitor::note() {
  const double now = steady_seconds();
  const Steps steps = [&] { return std::lock_guard(mutex_), std::exchange(steps_, {}); }();
  const Json host = one_line(control_.host(control_.rank()));
  Json rank = {{"rank", control_.rank()}, {"host", host}};
  if (steps.count > 0) rank["step_ms"] = 1e3 * steps.seconds / steps.count;
  if (steps.timed > 0) rank["work_ms"] = 1e3 * steps.work_s / steps.timed;
  if (const auto cores = rates_.of("cpu", seconds_of(CLOCK_PROCESS_CPUTIME_ID), now)) rank["cpu"] = *cores;
  const FlightBrief flight = control_.flight();
  if (control_.size() > 1 || flight.waiting > 0) rank["waits_for"] = flight.place;
  if (nvml_ && !nvml_->problem().empty()) rank["problem"] = nvml_->problem();
  else if (nvml_) rank["gpu"] = nvml_->look(now);
  Json note = {{"rank", rank}};
  if (reads_host_) note["host"] = {{"host", host}}, note["host"].update(host_load(rates_, now));
  round_floats(note);
  return note.dump();
}

void Monitor::write(const std::vector<std::string>& notes) {
  Json line = {{"time", seconds_of(CLOCK_REALTIME)}, {"step", step_.load()},
               {"hosts", Json::array()}, {"ranks", Json::array()}};
  for (const std::string& note : notes) {
    if (note.empty()) continue;  // it has not come in time
    const Json seen = Json::parse(note);
    if (seen.contains("host")) line["hosts"].push_back(seen["host"]);
    line["ranks"].push_back(seen["rank"]);
  }
  std::string lines = line.dump() + '\n';
  for (const std::string& text : outliers_.find(line, steady_seconds())) {
    print_error(text);
    lines += Json{{"time", line["time"]}, {"step", line["step"]}, {"warning", text}}.dump() + '\n';
  }
  if (log_ && line["step"] > 0) log_->append(lines);
}
