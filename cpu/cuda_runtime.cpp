// The host's side of CUDA's runtime on the CPU device: errors, devices and launches.
#include "cpu/cuda_runtime.h"

#include <cuda.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "cpu/log.h"
#include "cpu/sanitizers.h"
#include "cpu/streams.h"
#include "cpu/switches.h"

extern char** environ;

namespace cpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device = 0;  // the current one

// The variables CUDA_* of the environment.
std::map<std::string, std::string> cuda_variables() {
  std::map<std::string, std::string> variables;
  for (char** one = environ; *one; ++one)
    if (const std::string_view text = *one; text.starts_with("CUDA_"))
      variables.emplace(text.substr(0, text.find('=')), text.substr(text.find('=') + 1));
  return variables;
}

const std::map<std::string, std::string>& variables_that_were_read() {
  static const auto variables = cuda_variables();
  return variables;
}

}  // namespace

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int current_device() { return device; }

static int device_count() { return std::abs(switches().devices); }

cudaError_t call_driver() {
  const auto &then = variables_that_were_read(), now = cuda_variables();
  for (const auto* variables : {&then, &now})
    for (const auto& [name, value] : *variables)
      if (!then.contains(name) || !now.contains(name) || then.at(name) != now.at(name))
        fatal("%s was changed after the first CUDA call, which has read it: change it before", name.c_str());
  return remember(device_count() > 0 ? cudaSuccess : cudaErrorInsufficientDriver);
}

void load(const void* code, size_t variant) {
  static std::set<std::pair<const void*, size_t>> loaded;
  if (switches().loads_late && loaded.insert({code, variant}).second) drain_device();
}

bool check_launch(const Launch& launch) {
  const dim3 &grid = launch.grid, &block = launch.block;
  size_t threads = size_t(block.x) * block.y * block.z;
  bool grid_fits = grid.x && grid.y && grid.z && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
  bool block_fits = threads > 0 && threads <= 1024 && block.z <= 64;
  bool makes_clusters = launch.cluster == 1 || (launch.cluster && grid.x % launch.cluster == 0 && threads % 32 == 0);
  if (!grid_fits || !block_fits || !makes_clusters) return remember(cudaErrorInvalidConfiguration), false;
  if (!may_have_its_shared_memory(launch)) return remember(cudaErrorInvalidValue), false;
  if (!is_here(launch.stream)) return remember(cudaErrorInvalidResourceHandle), false;
  log("kernel %d %s %zu", number_of(launch.stream), launch.kernel, size_t(grid.x) * grid.y * grid.z);
  load(launch.code, 0);
  ++counts.launches;
  return true;
}

}  // namespace cpu

using cpu::remember;

void __threadfence() {
  static const char fences = 0;  // for the race detector, every fence comes after all earlier ones
  std::atomic_thread_fence(std::memory_order_seq_cst);
  cpu::sanitizers::release(&fences);
  cpu::sanitizers::acquire(&fences);
}

// ---- errors and devices

#define CPU_ERRORS(X)                                                                                          \
  X(cudaSuccess, "no error")                                                                                   \
  X(cudaErrorInvalidValue, "invalid argument")                                                                 \
  X(cudaErrorMemoryAllocation, "out of memory")                                                                \
  X(cudaErrorInvalidConfiguration, "invalid configuration argument (grid, or more than 1024 threads a block)") \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                                                          \
  X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version")               \
  X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                                 \
  X(cudaErrorNotReady, "device not ready")

const char* cudaGetErrorName(cudaError_t error) {
#define CPU_NAME(code, text) \
  if (error == code) return #code;
  CPU_ERRORS(CPU_NAME)
  return "unknown error";
}

const char* cudaGetErrorString(cudaError_t error) {
#define CPU_TEXT(code, text) \
  if (error == code) return text;
  CPU_ERRORS(CPU_TEXT)
  return "unknown error";
}

cudaError_t cudaPeekAtLastError() { return cpu::last_error; }

cudaError_t cudaGetLastError() { return std::exchange(cpu::last_error, cudaSuccess); }

static bool exists(int device) { return device >= 0 && device < cpu::device_count(); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = cpu::device_count();
  return cpu::call_driver();
}

cudaError_t cudaGetDevice(int* device) {
  return *device = cpu::device, remember(cpu::device_count() > 0 ? cudaSuccess : cudaErrorInsufficientDriver);
}

cudaError_t cudaSetDevice(int device) {
  cpu::variables_that_were_read();
  if (!exists(device)) return remember(cudaErrorInvalidDevice);
  return cpu::device = device, cudaSuccess;
}

// Each process has a device of its own, unless GPT_CPU_DEVICES says how many the processes of this host have.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const cudaError_t error = cpu::call_driver()) return error;
  if (!exists(device)) return remember(cudaErrorInvalidDevice);
  *properties = {};
  std::string name = "CPU", line;
  std::ifstream cpuinfo("/proc/cpuinfo");
  while (std::getline(cpuinfo, line) && !line.starts_with("model name")) {}
  if (cpuinfo) name = line.substr(std::min(line.size(), line.find(':') + 2));
  std::snprintf(properties->name, sizeof properties->name, "%s", name.c_str());
  const int id = cpu::switches().devices > 0 ? device : getpid();
  std::memcpy(properties->uuid.bytes, &id, sizeof id);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int device) {
  if (!exists(device) || bytes < 1) return remember(cudaErrorInvalidDevice);
  return *id = 0, cudaSuccess;
}

// Compute capability is 9.0, because Hopper's instructions are emulated (extensions/hopper/kernels/hopper.cuh). Each worker is one
// multiprocessor, unless GPT_CPU_MULTIPROCESSORS says another number. The build that counts like a GPU has as many as an
// H100.
#if defined(CPU_LIKE_A_GPU)
static int multiprocessors() { return 132; }
#else
static int multiprocessors() {
  return cpu::switches().multiprocessors ? cpu::switches().multiprocessors : omp_get_max_threads();
}
#endif

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return remember(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors(); break;
    case cudaDevAttrIntegrated: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(cpu::most_shared_bytes); break;
    default: return remember(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

// ---- the driver

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  const auto& variables = cpu::variables_that_were_read();
  const auto set = variables.find("CUDA_MODULE_LOADING");
  const bool is_eager = set != variables.end() && set->second == "EAGER";
  return *mode = is_eager ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING, CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool is_known = std::strcmp(symbol, "cuModuleGetLoadingMode") == 0;
  *function = is_known ? reinterpret_cast<void*>(&cuModuleGetLoadingMode) : nullptr;
  *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
