// OUT/monitor.jsonl: the load of each device and each host, every --monitor-every seconds, and outliers.
//
// On every rank a thread reads counters and sends them to rank 0 over the control connection, as a note; it does not wait
// for an answer. Rank 0's thread waits up to 5 seconds for the others' notes and writes those that have come. No
// collective, and no other thread of the program, depends on that: a monitor that fails says so, and training goes on.
//
// The file is a log by time: a resumed run, or one that went back, goes on behind the lines that are there. The first look
// follows the first step, so a run that fails before leaves nothing behind; the last one is at the end. Floating-point
// numbers have 6 significant digits (but for the time). Unknown values are absent; rates are averages since the last
// look, so the first look has none.
//
//   a look
//     time                   seconds since 1970 (Unix)
//     step                   rank 0's last step that has ended
//     hosts                  list of objects, one for each host:
//       host                 its name
//       cpu                  busy share of all its processors
//       memory_bytes, memory_total_bytes       in use (total minus available), in all
//       swap_bytes, swap_bytes_per_s           in use; read and written
//       network_bytes_per_s  {in, out} of all interfaces but lo. InfiniBand is none of them
//       disk_bytes_per_s     {read, write} of all disks
//     ranks                  list of objects, one for each rank:
//       rank, host
//       step_ms              mean of its steps since the last look
//       work_ms              the same without the time in which the device only waited for other ranks; of steps whose
//                            collectives were timed
//       cpu                  seconds of processor time of its process per second
//       waits_for            the oldest collective that it has entered, or the next one that it has not reached
//       problem              why nothing is known of its GPU
//       gpu                  absent on the CPU device; null: the card has been lost
//         utilisation        share of the time in which a kernel ran (NCCL's kernels, which may only wait, too)
//         memory_bytes, memory_total_bytes, power_w, power_limit_w, temperature_c, sm_mhz, memory_mhz
//         slowdown_c         temperature at which the hardware lowers the clocks
//         throttled          why clocks are lower than they could be: power, thermal, power_brake, hardware_slowdown
//         pcie_bytes_per_s, nvlink_bytes_per_s   {in, out}; PCIe: of 20 ms
//         ecc_corrected, ecc_uncorrected         errors of memory since the driver was loaded
//   something that stands out
//     time, step
//     warning                text, which the terminal has, too
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <thread>
#include <vector>

#include "runtime/control/control.h"
#include "runtime/monitor/readings.h"
#include "runtime/reports/metrics.h"

// Finds outliers, and names each once for each rank (or host) and kind.
class Outliers {
 public:
  using Json = nlohmann::ordered_json;

  // A rank is slow if its own work takes 1.25 times as long as the median of its stage (1 / 0.8, as --check-ranks) in three
  // looks in a row, because other programs disturb a host for seconds.
  static constexpr double slow = 1.25;
  static constexpr int looks_to_be_slow = 3;
  // A GPU is hot 5 °C below the temperature at which it halves its clocks: sensors of one card differ by as much.
  static constexpr double hot_margin_c = 5;
  // A host counts as swapping after two such looks in a row. 1 MiB is 256 pages a second, of 0.1 ms each on an SSD: 2.6 % of
  // the time.
  static constexpr double swapping_bytes_per_s = 1 << 20;
  static constexpr int looks_to_swap = 2;
  // A device is idle below these limits: share of a GPU's time, or processor time of a rank that ends no steps. Its
  // threads look after connections, and wake up every millisecond while they wait.
  static constexpr double idle_gpu = 0.01, idle_cpu = 0.25;
  static constexpr double idle_s = 60;  // seconds after which an idle device is named

  // ranks_of_a_stage: neighbours with the same work
  explicit Outliers(int ranks_of_a_stage) : ranks_of_a_stage_(ranks_of_a_stage) {}

  // Returns the new outliers of this look, given the object of its line. now: seconds of a clock that nobody sets
  std::vector<std::string> find(const Json& look, double now);

 private:
  void find_slow(const Json& ranks);
  void judge_gpu(const Json& rank);
  void find_idle(const Json& rank, double now);
  void consider(const Json& rank, const char* kind, bool is_so, const std::string& text, int looks = 1);

  int ranks_of_a_stage_;
  std::map<std::string, int> in_a_row_;             // by rank or host, and kind: the number of looks
  std::map<int, double> busy_;                      // when a rank's device was last busy
  std::map<std::string, std::vector<Json>> found_;  // in this look, by text: the ranks or hosts that it is about
};

struct MonitorOptions {
  double every_s = 10;              // 0: the monitor is off
  std::filesystem::path path = {};  // of the file; empty: none is written
  std::string pci_bus_id = {};      // of this rank's GPU; empty: the CPU device, which has no NVML, unless GPT_NVML names one
  int ranks_of_a_stage = 1;
};

class Monitor {
 public:
  Monitor(Control& control, MonitorOptions options);

  // A step of this rank has ended. waited_s: how long its device only waited for other ranks; none: not known
  void add_step(size_t step, double seconds, std::optional<double> waited_s);

  // Takes a last look, which an error leaves out.
  void finish();

 private:
  void watch(const std::stop_token& stop);
  std::string note();
  void write(const std::vector<std::string>& notes);

  Control& control_;
  const MonitorOptions options_;
  std::optional<MetricsLog> log_;
  Outliers outliers_;
  bool reads_host_ = true;  // this is the first rank of its host
  std::optional<Nvml> nvml_;
  Rates rates_;

  std::mutex mutex_;  // protects the next two
  std::condition_variable_any changed_;
  struct Steps {
    int count = 0, timed = 0;
    double seconds = 0, work_s = 0;  // seconds of all steps; work of the timed ones
  } steps_;                          // since the last look
  std::atomic<size_t> step_ = 0;  // the last one that has ended; 0: none has
  std::atomic<bool> has_ended_ = false;  // finish() was called

  std::jthread thread_;  // declared last, so that it ends before the other members are destroyed
};
