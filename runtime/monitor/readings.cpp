#include "runtime/monitor/readings.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>

#include "gpt/base/error.h"

using Json = nlohmann::ordered_json;

std::optional<double> Rates::of(const std::string& name, double count, double now) {
  const auto [place, is_new] = last_.try_emplace(name, count, now);
  const auto [before, then] = std::exchange(place->second, {count, now});
  return is_new || now <= then || count < before ? std::nullopt : std::optional((count - before) / (now - then));
}

void Rates::add(Json& to, const char* key, std::array<const char*, 2> names, std::array<double, 2> counts, double now) {
  for (size_t i : {0, 1})
    if (const auto rate = of(concat(key, names[i]), counts[i], now)) to[key][names[i]] = *rate;
}

namespace {

// The lines of a file of /proc: the numbers behind the name, which is word number `name` (from 0), and zeros behind those.
std::map<std::string, std::vector<double>> table_of(const std::filesystem::path& path, int name = 0) {
  std::map<std::string, std::vector<double>> table;
  std::ifstream file(path);
  for (std::string line, word; std::getline(file, line);) {
    std::ranges::replace(line, ':', ' ');
    std::istringstream words(line);
    for (int i = 0; i <= name; ++i) words >> word;
    std::vector<double> numbers;
    for (double number; words >> number;) numbers.push_back(number);
    if (numbers.empty()) continue;
    numbers.resize(20);
    table[word] = numbers;
  }
  return table;
}

// ---- layouts and numbers of NVML: https://docs.nvidia.com/deploy/nvml-api

constexpr int NVML_SUCCESS = 0, NVML_ERROR_FUNCTION_NOT_FOUND = 13, NVML_ERROR_GPU_IS_LOST = 15;
constexpr unsigned NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139;
struct nvmlUtilization_t { unsigned gpu, memory; };  // percent
struct nvmlMemory_t { unsigned long long total, free, used; };
struct nvmlFieldValue_t {  // value: a union, of which our fields use this member
  unsigned fieldId, scopeId;
  long long timestamp, latencyUsec;
  int valueType, nvmlReturn;
  unsigned long long value;
};

// Bits of the reasons for lower clocks. An idle GPU, and clocks set by an administrator, are not reported.
// power: by software, at the limit of power; thermal: by software or hardware; power_brake: the host's power supply
// asks for it; hardware_slowdown: by hardware, also for one of the two before
constexpr std::pair<unsigned long long, const char*> throttle_reasons[] = {
    {0x04, "power"}, {0x20 | 0x40, "thermal"}, {0x80, "power_brake"}, {0x08, "hardware_slowdown"}};

// Calls a function of the library, whose parameters have exactly the types of the arguments.
template <class... Arguments>
int call(void* library, const char* name, Arguments... arguments) {
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  return function ? function(arguments...) : NVML_ERROR_FUNCTION_NOT_FOUND;
}

}  // namespace

Json host_load(Rates& rates, double now, const std::filesystem::path& root) {
  Json load = Json::object();
  const std::filesystem::path proc = root / "proc";
  if (auto stat = table_of(proc / "stat"); stat.contains("cpu")) {  // ticks: user, nice, system, idle, iowait, irq, softirq, steal
    const std::vector<double>& t = stat["cpu"];
    const double busy = t[0] + t[1] + t[2] + t[5] + t[6] + t[7];
    const auto work = rates.of("busy", busy, now), all = rates.of("ticks", busy + t[3] + t[4], now);
    if (work && all && *all > 0) load["cpu"] = *work / *all;
  }
  auto memory = table_of(proc / "meminfo");  // in KiB
  const auto kib = [&](const char* name) { return memory.contains(name) ? memory[name][0] : 0; };
  if (!memory.empty()) {
    load["memory_bytes"] = size_t(1024 * (kib("MemTotal") - kib("MemAvailable")));
    load["memory_total_bytes"] = size_t(1024 * kib("MemTotal"));
    load["swap_bytes"] = size_t(1024 * (kib("SwapTotal") - kib("SwapFree")));
  }
  if (auto pages = table_of(proc / "vmstat"); pages.contains("pswpin")) {
    const double swapped = double(sysconf(_SC_PAGESIZE)) * (pages["pswpin"][0] + pages["pswpout"][0]);
    if (const auto rate = rates.of("swapped", swapped, now)) load["swap_bytes_per_s"] = *rate;
  }
  std::array<double, 2> network = {}, disks = {};
  for (const auto& [name, numbers] : table_of(proc / "net/dev"))  // 8 numbers of received data, bytes first, and 8 of sent data
    if (name != "lo") network[0] += numbers[0], network[1] += numbers[8];
  rates.add(load, "network_bytes_per_s", {"in", "out"}, network, now);
  // Behind a disk's name: reads, merged ones, sectors of 512 bytes, milliseconds, and the same for writes. Partitions, and
  // devices that lie on others (dm, md, loop), are no device in /sys/block.
  for (const auto& [name, numbers] : table_of(proc / "diskstats", 2))
    if (std::filesystem::exists(root / "sys/block" / name / "device")) disks[0] += 512 * numbers[2], disks[1] += 512 * numbers[6];
  rates.add(load, "disk_bytes_per_s", {"read", "write"}, disks, now);
  return load;
}

Nvml::Nvml(const std::string& pci_bus_id) {
  const char *other = std::getenv("GPT_NVML"), *file = other ? other : "libnvidia-ml.so.1";
  library_ = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  int result = library_ ? call(library_, "nvmlInit_v2") : 0;
  if (library_ && result == NVML_SUCCESS)
    result = call(library_, "nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id.c_str(), &device_);
  if (library_ && result == NVML_SUCCESS) return;
  problem_ = "no readings of the GPU: " + (library_ ? concat(file, " answers with error ", result) : one_line(dlerror()));
}

// Does the library have the function, and has it succeeded?
template <class... Arguments>
bool Nvml::ask(const char* function, Arguments... arguments) {
  if (!device_ || is_lost_) return false;
  const int result = call(library_, function, device_, arguments...);
  is_lost_ = result == NVML_ERROR_GPU_IS_LOST;
  return result == NVML_SUCCESS;
}

Json Nvml::look(double now) {
  Json gpu = Json::object();
  const auto add = [&](const char* key, double unit, const char* function, auto... arguments) {
    unsigned value = 0;
    if (ask(function, arguments..., &value)) gpu[key] = unit * value;
  };
  if (nvmlUtilization_t busy; ask("nvmlDeviceGetUtilizationRates", &busy)) gpu["utilisation"] = busy.gpu / 100.0;
  if (nvmlMemory_t memory; ask("nvmlDeviceGetMemoryInfo", &memory))
    gpu["memory_bytes"] = memory.used, gpu["memory_total_bytes"] = memory.total;
  add("power_w", 1e-3, "nvmlDeviceGetPowerUsage");
  add("power_limit_w", 1e-3, "nvmlDeviceGetEnforcedPowerLimit");
  add("temperature_c", 1, "nvmlDeviceGetTemperature", 0);         // NVML_TEMPERATURE_GPU
  add("slowdown_c", 1, "nvmlDeviceGetTemperatureThreshold", 1);   // NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
  add("sm_mhz", 1, "nvmlDeviceGetClockInfo", 1);                  // NVML_CLOCK_SM
  add("memory_mhz", 1, "nvmlDeviceGetClockInfo", 2);              // NVML_CLOCK_MEM
  if (unsigned long long bits = 0; ask("nvmlDeviceGetCurrentClocksThrottleReasons", &bits)) {
    gpu["throttled"] = Json::array();
    for (const auto& [mask, name] : throttle_reasons)
      if (bits & mask) gpu["throttled"].push_back(name);
  }
  unsigned in = 0, out = 0;  // KB/s; NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES
  if (ask("nvmlDeviceGetPcieThroughput", 1, &in) && ask("nvmlDeviceGetPcieThroughput", 0, &out))
    gpu["pcie_bytes_per_s"] = {{"in", 1e3 * in}, {"out", 1e3 * out}};
  nvmlFieldValue_t links[2] = {{NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, UINT_MAX, 0, 0, 0, 0, 0},  // KiB of all links together
                               {NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, UINT_MAX, 0, 0, 0, 0, 0}};
  if (ask("nvmlDeviceGetFieldValues", 2, links + 0) && !links[0].nvmlReturn && !links[1].nvmlReturn)
    rates_.add(gpu, "nvlink_bytes_per_s", {"in", "out"}, {1024. * double(links[0].value), 1024. * double(links[1].value)}, now);
  for (const auto& [key, type] : {std::pair("ecc_corrected", 0), {"ecc_uncorrected", 1}})  // since the driver was loaded: 0
    if (unsigned long long errors = 0; ask("nvmlDeviceGetTotalEccErrors", type, 0, &errors)) gpu[key] = errors;
  return is_lost_ ? Json() : gpu;
}
