#include "runtime/reports/host_load.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>

#include <unistd.h>

namespace {

// The first words of all lines, and the numbers behind them, of a file such as /proc/meminfo.
std::map<std::string, double> numbers_of(const std::filesystem::path& path) {
  std::map<std::string, double> numbers;
  std::ifstream file(path);
  std::string name;
  for (double number = 0; file >> name >> number; file.ignore(1 << 20, '\n')) numbers[name] = number;
  return numbers;
}

}  // namespace

nlohmann::ordered_json HostLoad::look(double now) {
  nlohmann::ordered_json load = {{"host", host_}};
  add_cpu(load, now);
  add_memory(load, now);
  add_network(load, now);
  add_disks(load, now);
  return load;
}

// The first line of /proc/stat: "cpu", then ticks of all cores as user, nice, system, idle, iowait, irq, softirq, steal.
void HostLoad::add_cpu(nlohmann::ordered_json& load, double now) {
  std::ifstream file(root_ / "proc/stat");
  std::string name;
  file >> name;
  double all = 0, idle = 0, ticks = 0;
  for (int i = 0; i < 8 && file >> ticks; ++i) all += ticks, idle += i == 3 || i == 4 ? ticks : 0;
  const std::optional<double> busy = rates_.of("busy", all - idle, now), total = rates_.of("ticks", all, now);
  if (busy && total && *total > 0) load["cpu"] = *busy / *total;
}

// Sizes in /proc/meminfo are in KiB, pages in /proc/vmstat are those of the processor.
void HostLoad::add_memory(nlohmann::ordered_json& load, double now) {
  std::map<std::string, double> sizes = numbers_of(root_ / "proc/meminfo"), pages = numbers_of(root_ / "proc/vmstat");
  if (sizes.contains("MemTotal:")) {
    load["memory_bytes"] = size_t(1024 * (sizes["MemTotal:"] - sizes["MemAvailable:"]));
    load["memory_total_bytes"] = size_t(1024 * sizes["MemTotal:"]);
    load["swap_bytes"] = size_t(1024 * (sizes["SwapTotal:"] - sizes["SwapFree:"]));
  }
  if (!pages.contains("pswpin")) return;
  const double swapped = (pages["pswpin"] + pages["pswpout"]) * double(sysconf(_SC_PAGESIZE));
  if (const std::optional<double> rate = rates_.of("swapped", swapped, now)) load["swap_bytes_per_s"] = *rate;
}

// A line of /proc/net/dev: the interface, 8 numbers of what it received, bytes first, and 8 of what it sent.
void HostLoad::add_network(nlohmann::ordered_json& load, double now) {
  std::ifstream file(root_ / "proc/net/dev");
  double in = 0, out = 0;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == line.npos || line.substr(0, colon).ends_with("lo")) continue;
    std::istringstream numbers(line.substr(colon + 1));
    double number = 0;
    for (int i = 0; numbers >> number; ++i) (i == 0 ? in : out) += i % 8 ? 0 : number;
  }
  const std::optional<double> received = rates_.of("in", in, now), sent = rates_.of("out", out, now);
  if (received && sent) load["network_bytes_per_s"] = {{"in", *received}, {"out", *sent}};
}

// A line of /proc/diskstats: two numbers and the name, then reads: done, merged, sectors, milliseconds, and the same for
// writes. A sector has 512 bytes here. Partitions, and devices that lie on others (dm, md, loop), are no device in /sys/block.
void HostLoad::add_disks(nlohmann::ordered_json& load, double now) {
  std::ifstream file(root_ / "proc/diskstats");
  double read = 0, written = 0;
  bool has_disk = false;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, skipped;
    double in = 0, out = 0;
    words >> skipped >> skipped >> name >> skipped >> skipped >> in >> skipped >> skipped >> skipped >> out;
    if (!words || !std::filesystem::exists(root_ / "sys/block" / name / "device")) continue;
    has_disk = true, read += 512 * in, written += 512 * out;
  }
  const std::optional<double> reads = rates_.of("read", read, now), writes = rates_.of("written", written, now);
  if (has_disk && reads && writes) load["disk_bytes_per_s"] = {{"read", *reads}, {"write", *writes}};
}
