#include "runtime/reports/monitor.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <limits>

#include <pthread.h>

#include "parallel/processes/error.h"
#include "parallel/processes/text.h"

namespace {

constexpr double patience_s = 5;  // that rank 0 has with the notes of the others

double process_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

double unix_seconds() {
  using namespace std::chrono;
  return double(duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count()) / 1e3;
}

// Rounds all floating-point numbers to 6 significant digits, which dump() then prints.
void round_floats(nlohmann::ordered_json& value) {
  if (value.is_number_float()) value = std::atof(formatted("%.6g", value.get<double>()).c_str());
  if (!value.is_structured()) return;
  for (auto& element : value) round_floats(element);
}

}  // namespace

// ---- what stands out

std::vector<std::string> Outliers::find(const nlohmann::ordered_json& look) {
  found_.clear();
  std::vector<std::string> texts;
  for (const auto& host : look["hosts"]) {
    const double rate = host.value("swap_bytes_per_s", 0.);
    const std::string name = host["host"];
    if (lasts(name, "swaps", rate > swapping_bytes_per_s, looks_to_swap) && named_.insert({name, "swaps"}).second)
      texts.push_back(formatted("host %s swaps %.1f MB/s: its memory is too small for what runs on it", name.c_str(), rate / 1e6));
  }
  find_slow(look["ranks"]);
  for (const auto& rank : look["ranks"]) judge_gpu(rank), find_idle(rank, look["time"]);
  for (const auto& [text, ranks] : found_)
    texts.push_back(rank_list(ranks) + (ranks.size() > 1 ? ": " : " (" + hosts_[ranks[0]] + "): ") + text);
  return texts;
}

// Is it so now, and in the looks before?
bool Outliers::lasts(const std::string& who, const char* kind, bool is_so, int looks) {
  int& count = looks_[{who, kind}];
  count = is_so ? count + 1 : 0;
  return count >= looks;
}

void Outliers::name(const Object& rank, const char* kind, const std::string& text) {
  const int number = rank["rank"];
  if (!named_.insert({std::to_string(number), kind}).second) return;
  found_[text].push_back(number);
  hosts_[number] = rank["host"];
}

void Outliers::find_slow(const Object& ranks) {
  std::map<int, std::vector<double>> stages;
  for (const auto& rank : ranks)
    if (rank.contains("work_ms")) stages[rank["rank"].get<int>() / ranks_of_a_stage_].push_back(rank["work_ms"]);
  for (const auto& rank : ranks) {
    if (!rank.contains("work_ms")) continue;
    const double mine = rank["work_ms"];
    std::vector<double>& all = stages[rank["rank"].get<int>() / ranks_of_a_stage_];
    const auto middle = all.begin() + long(all.size() - 1) / 2;  // of two ranks the faster one
    std::ranges::nth_element(all, middle);
    if (lasts(std::to_string(rank["rank"].get<int>()), "slow", mine > slow * *middle, looks_to_be_slow))
      name(rank, "slow", formatted("slow: its own work takes %.1f ms a step, %.2f times the median of %.1f ms: the others "
                                   "wait for it", mine, mine / *middle, *middle));
  }
}

void Outliers::judge_gpu(const Object& rank) {
  if (rank.contains("problem")) name(rank, "problem", rank["problem"]);
  if (!rank.contains("gpu")) return;
  const Object& gpu = rank["gpu"];
  if (gpu.is_null()) return name(rank, "lost", "NVML has lost the GPU: the kernel's log (dmesg) has the Xid; restart the host");
  const double degrees = gpu.value("temperature_c", 0.), slowdown = gpu.value("slowdown_c", 1e9);
  const std::string temperature = gpu.contains("temperature_c") ? formatted("GPU at %.0f °C, ", degrees) : "GPU: ";
  if (degrees >= slowdown - hot_margin_c) name(rank, "hot", temperature + formatted("slows down at %.0f", slowdown));
  std::vector<std::string> reasons;
  for (const std::string reason : gpu.value("throttled", Object::array()))
    if (reason != "power") reasons.push_back(reason);  // at its limit of power a busy GPU is as fast as it should be
  if (!reasons.empty()) name(rank, "throttled", temperature + "clocks lowered by " + joined(reasons));
}

// A GPU's utilisation tells; without one, an idle rank ends no steps and takes no processor time.
void Outliers::find_idle(const Object& rank, double now) {
  const int number = rank["rank"];
  const Object gpu = rank.value("gpu", Object());
  const bool has_share = gpu.is_object() && gpu.contains("utilisation");
  const bool is_idle = has_share ? gpu["utilisation"] < idle_gpu : !rank.contains("step_ms") && rank.value("cpu", 1.) < idle_cpu;
  const double busy = busy_.try_emplace(number, now).first->second;
  if (!is_idle) busy_[number] = now;
  else if (now - busy >= idle_s_)
    name(rank, "idle", formatted("device idle for %.0f s: ", now - busy) +
                           rank.value("waits_for", "in no collective: does it wait for a disk?"));
}

// ---- the monitor

Monitor::Monitor(Control& control, MonitorOptions options)
    : control_(control), options_(std::move(options)), outliers_(options_.ranks_of_a_stage, options_.idle_s) {
  if (options_.every_s <= 0) return;
  if (!options_.path.empty()) log_.emplace(options_.path, std::numeric_limits<size_t>::max());
  bool is_first = true;
  for (int rank = 0; rank < control.rank(); ++rank) is_first &= control.host(rank) != control.host(control.rank());
  if (is_first) host_.emplace(one_line(control.host(control.rank())));
  thread_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

void Monitor::add_step(size_t step, double seconds, std::optional<double> waited_s) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  ++steps_.count, steps_.seconds += seconds;
  if (waited_s) ++steps_.timed, steps_.work_s += seconds - *waited_s;
  if (!std::exchange(has_begun_, true)) changed_.notify_all();
}

void Monitor::finish() {
  has_ended_ = true;
  thread_ = {};  // asks it to stop, and waits for that
}

// Looks are due at fixed times after the first step, so that all ranks take the same ones together.
void Monitor::watch(const std::stop_token& stop) {
  using Clock = std::chrono::steady_clock;
  pthread_setname_np(pthread_self(), "monitor");
  const auto every = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.every_s));
  Clock::time_point due = Clock::now();
  const auto wait = [&](const bool& early) {
    due += every * (1 + std::max<long>(0, (Clock::now() - due) / every));  // leaves out what is overdue
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, stop, due, [&] { return early; });
  };
  const std::string problem = attempt([&] {
    if (Nvml::is_wanted(options_.pci_bus_id)) nvml_.emplace(options_.pci_bus_id);
    wait(has_begun_);
    due = Clock::now();
    for (bool is_last = false; has_ended_ || !stop.stop_requested(); is_last = stop.stop_requested()) {
      look();
      if (is_last) return;
      wait(false);
    }
  });
  if (!problem.empty()) print_error("the monitor ends, training goes on: " + one_line(problem));
}

void Monitor::look() {
  control_.send_note(note());
  if (control_.rank() == 0) write(control_.take_notes(patience_s));
}

// What this rank sees, as {"rank", "host"}: the objects of the line.
std::string Monitor::note() {
  const double now = steady_seconds();
  const Steps steps = [&] { return std::lock_guard(mutex_), std::exchange(steps_, {}); }();
  nlohmann::ordered_json rank = {{"rank", control_.rank()}, {"host", one_line(control_.host(control_.rank()))}};
  if (steps.count > 0) rank["step_ms"] = 1e3 * steps.seconds / steps.count;
  if (steps.timed > 0) rank["work_ms"] = 1e3 * steps.work_s / steps.timed;
  if (const std::optional<double> cores = rates_.of("cpu", process_seconds(), now)) rank["cpu"] = *cores;
  if (const FlightBrief flight = control_.flight(); control_.size() > 1 || flight.waiting > 0)
    rank["waits_for"] = flight.place;
  if (nvml_ && !nvml_->problem().empty()) rank["problem"] = nvml_->problem();
  else if (nvml_) rank["gpu"] = nvml_->look(now);
  nlohmann::ordered_json note = {{"rank", rank}};
  if (host_) note["host"] = host_->look(now);
  round_floats(note);
  return note.dump();
}

void Monitor::write(const std::vector<std::string>& notes) {
  const auto none = nlohmann::ordered_json::array();
  nlohmann::ordered_json line = {{"time", unix_seconds()}, {"step", 0}, {"hosts", none}, {"ranks", none}};
  const bool has_begun = [&] { return std::lock_guard(mutex_), line["step"] = step_, has_begun_; }();
  for (const std::string& note : notes) {
    if (note.empty()) continue;  // it has not come in time
    nlohmann::ordered_json seen = nlohmann::ordered_json::parse(note);
    if (seen.contains("host")) line["hosts"].push_back(seen["host"]);
    line["ranks"].push_back(seen["rank"]);
  }
  const auto append = [&](const nlohmann::ordered_json& fields) {
    if (log_ && has_begun) log_->append(fields.dump() + '\n');
  };
  append(line);
  for (const std::string& text : outliers_.find(line)) {
    print_error(text);
    append({{"time", line["time"]}, {"step", line["step"]}, {"warning", text}});
  }
}
