#include "runtime/reports/nvml.h"

#include <climits>
#include <cstdlib>
#include <optional>
#include <type_traits>
#include <utility>

#include <dlfcn.h>

#include "parallel/processes/error.h"

namespace {

// ---- names, numbers and layouts of NVML: https://docs.nvidia.com/deploy/nvml-api

using nvmlReturn_t = int;
constexpr nvmlReturn_t NVML_SUCCESS = 0, NVML_ERROR_FUNCTION_NOT_FOUND = 13, NVML_ERROR_GPU_IS_LOST = 15;
using nvmlDevice_t = nvmlDevice_st*;

constexpr int NVML_TEMPERATURE_GPU = 0, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1;
constexpr int NVML_CLOCK_SM = 1, NVML_CLOCK_MEM = 2;
constexpr int NVML_PCIE_UTIL_TX_BYTES = 0, NVML_PCIE_UTIL_RX_BYTES = 1;
constexpr int NVML_MEMORY_ERROR_TYPE_CORRECTED = 0, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1, NVML_VOLATILE_ECC = 0;
constexpr unsigned NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139;

struct nvmlUtilization_t {
  unsigned gpu, memory;  // percent of the time since the driver's last sample
};
struct nvmlMemory_t {
  unsigned long long total, free, used;
};
struct nvmlFieldValue_t {
  unsigned fieldId, scopeId;
  long long timestamp = 0, latencyUsec = 0;
  int valueType = 0;
  nvmlReturn_t nvmlReturn = NVML_SUCCESS;
  unsigned long long value = 0;  // a union, of which our fields use this member
};

template <class... Parameters>
struct Function {
  const char* name;
};
constexpr Function<> nvmlInit = {"nvmlInit_v2"}, nvmlShutdown = {"nvmlShutdown"};
constexpr Function<const char*, nvmlDevice_t*> nvmlDeviceGetHandleByPciBusId = {"nvmlDeviceGetHandleByPciBusId_v2"};
constexpr Function<nvmlDevice_t, nvmlUtilization_t*> nvmlDeviceGetUtilizationRates = {"nvmlDeviceGetUtilizationRates"};
constexpr Function<nvmlDevice_t, nvmlMemory_t*> nvmlDeviceGetMemoryInfo = {"nvmlDeviceGetMemoryInfo"};
constexpr Function<nvmlDevice_t, unsigned*> nvmlDeviceGetPowerUsage = {"nvmlDeviceGetPowerUsage"};  // mW
constexpr Function<nvmlDevice_t, unsigned*> nvmlDeviceGetEnforcedPowerLimit = {"nvmlDeviceGetEnforcedPowerLimit"};
constexpr Function<nvmlDevice_t, int, unsigned*> nvmlDeviceGetTemperature = {"nvmlDeviceGetTemperature"};
constexpr Function<nvmlDevice_t, int, unsigned*> nvmlDeviceGetTemperatureThreshold = {"nvmlDeviceGetTemperatureThreshold"};
constexpr Function<nvmlDevice_t, int, unsigned*> nvmlDeviceGetClockInfo = {"nvmlDeviceGetClockInfo"};  // MHz
constexpr Function<nvmlDevice_t, unsigned long long*> nvmlDeviceGetCurrentClocksThrottleReasons = {
    "nvmlDeviceGetCurrentClocksThrottleReasons"};
constexpr Function<nvmlDevice_t, int, unsigned*> nvmlDeviceGetPcieThroughput = {"nvmlDeviceGetPcieThroughput"};  // KB/s of 20 ms
constexpr Function<nvmlDevice_t, int, nvmlFieldValue_t*> nvmlDeviceGetFieldValues = {"nvmlDeviceGetFieldValues"};
constexpr Function<nvmlDevice_t, int, int, unsigned long long*> nvmlDeviceGetTotalEccErrors = {"nvmlDeviceGetTotalEccErrors"};

template <class... Parameters>
nvmlReturn_t call(void* library, const Function<Parameters...>& function, std::type_identity_t<Parameters>... arguments) {
  const auto entry = reinterpret_cast<nvmlReturn_t (*)(Parameters...)>(dlsym(library, function.name));
  return entry ? entry(arguments...) : NVML_ERROR_FUNCTION_NOT_FOUND;
}

// Bits of the reasons for lower clocks. Of the others, an idle GPU, clocks that somebody has set, and SLI are no news.
constexpr struct {
  unsigned long long bits;
  const char* name;
} throttle_reasons[] = {{0x04, "power"},                 // the limit of power, by software
                        {0x20 | 0x40, "thermal"},        // by software, by hardware
                        {0x80, "power_brake"},           // what supplies the host with power asks for it
                        {0x08, "hardware_slowdown"}};    // one of the two before, or a surge

}  // namespace

bool Nvml::is_wanted(const std::string& pci_bus_id) { return !pci_bus_id.empty() || std::getenv("GPT_NVML"); }

Nvml::Nvml(const std::string& pci_bus_id) {
  const char* other = std::getenv("GPT_NVML");
  const std::string file = other ? other : "libnvidia-ml.so.1";
  library_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library_) {
    problem_ = concat("no readings of the GPU: ", one_line(dlerror()));
    return;
  }
  nvmlReturn_t result = call(library_, nvmlInit);
  if (result == NVML_SUCCESS) result = call(library_, nvmlDeviceGetHandleByPciBusId, pci_bus_id.c_str(), &device_);
  if (result != NVML_SUCCESS) device_ = nullptr, problem_ = concat("no readings of the GPU: ", file, " answers with error ", result);
}

Nvml::~Nvml() {
  if (!library_) return;
  call(library_, nvmlShutdown);
  dlclose(library_);
}

// Does the library have the function, and has it succeeded?
template <class Function, class... Arguments>
bool Nvml::ask(const Function& function, Arguments... arguments) {
  if (!device_ || is_lost_) return false;
  const nvmlReturn_t result = call(library_, function, device_, arguments...);
  is_lost_ = result == NVML_ERROR_GPU_IS_LOST;
  return result == NVML_SUCCESS;
}

nlohmann::ordered_json Nvml::look(double now) {
  nlohmann::ordered_json gpu = nlohmann::ordered_json::object();
  const auto add = [&](const char* key, double unit, const auto& function, auto... arguments) {
    unsigned value = 0;
    if (ask(function, arguments..., &value)) gpu[key] = unit * value;
  };
  if (nvmlUtilization_t busy; ask(nvmlDeviceGetUtilizationRates, &busy)) gpu["utilisation"] = busy.gpu / 100.0;
  if (nvmlMemory_t memory; ask(nvmlDeviceGetMemoryInfo, &memory))
    gpu["memory_bytes"] = memory.used, gpu["memory_total_bytes"] = memory.total;
  add("power_w", 1e-3, nvmlDeviceGetPowerUsage);
  add("power_limit_w", 1e-3, nvmlDeviceGetEnforcedPowerLimit);
  add("temperature_c", 1, nvmlDeviceGetTemperature, NVML_TEMPERATURE_GPU);
  add("slowdown_c", 1, nvmlDeviceGetTemperatureThreshold, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN);
  add("sm_mhz", 1, nvmlDeviceGetClockInfo, NVML_CLOCK_SM);
  add("memory_mhz", 1, nvmlDeviceGetClockInfo, NVML_CLOCK_MEM);
  if (unsigned long long bits = 0; ask(nvmlDeviceGetCurrentClocksThrottleReasons, &bits)) {
    gpu["throttled"] = nlohmann::ordered_json::array();
    for (const auto& reason : throttle_reasons)
      if (bits & reason.bits) gpu["throttled"].push_back(reason.name);
  }
  add_traffic(gpu, now);
  for (const auto& [key, type] : {std::pair("ecc_corrected", NVML_MEMORY_ERROR_TYPE_CORRECTED),
                                  {"ecc_uncorrected", NVML_MEMORY_ERROR_TYPE_UNCORRECTED}})
    if (unsigned long long errors = 0; ask(nvmlDeviceGetTotalEccErrors, type, NVML_VOLATILE_ECC, &errors)) gpu[key] = errors;
  return is_lost_ ? nlohmann::ordered_json() : gpu;
}

// PCIe as it is at this moment, NVLink since the last look: a counter of KiB, of all links together.
void Nvml::add_traffic(nlohmann::ordered_json& gpu, double now) {
  unsigned in = 0, out = 0;
  if (ask(nvmlDeviceGetPcieThroughput, NVML_PCIE_UTIL_RX_BYTES, &in) &&
      ask(nvmlDeviceGetPcieThroughput, NVML_PCIE_UTIL_TX_BYTES, &out))
    gpu["pcie_bytes_per_s"] = {{"in", 1e3 * in}, {"out", 1e3 * out}};
  nvmlFieldValue_t links[2] = {{.fieldId = NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, .scopeId = UINT_MAX},
                               {.fieldId = NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, .scopeId = UINT_MAX}};
  if (!ask(nvmlDeviceGetFieldValues, 2, links)) return;
  if (links[0].nvmlReturn != NVML_SUCCESS || links[1].nvmlReturn != NVML_SUCCESS) return;
  const std::optional<double> received = rates_.of("in", 1024.0 * double(links[0].value), now);
  const std::optional<double> sent = rates_.of("out", 1024.0 * double(links[1].value), now);
  if (received && sent) gpu["nvlink_bytes_per_s"] = {{"in", *received}, {"out", *sent}};
}
