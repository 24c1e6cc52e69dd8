// Which device a rank takes, and what must be so before CUDA is asked for anything.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt/base/error.h"
#include "gpt/device_choice.h"
#include "gpt/launch.h"
#include "kernels/device/driver.cuh"
#include "runtime/control/control.h"

// Sets the variables that CUDA reads in its first call. MPI may make that call, so this comes before MPI is started.
inline void prepare_cuda(const Launch& launch) {
  // Streams that share a queue of the device wait for each other: the default is 8 queues.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  if (launch.size == 1) return;
  // Lazily loaded, a kernel may wait at its first launch until the device is idle. If a message is expected from
  // another rank, which waits for what follows this launch, both wait for ever.
  if (const std::string mode = environment("CUDA_MODULE_LOADING"); launch.rank == 0 && !mode.empty() && mode != "EAGER")
    print_error("CUDA_MODULE_LOADING is " + excerpt(mode) + ", and several ranks need EAGER: it is used");
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
}

inline std::string device_name(int device = 0) {
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

// Fails, and says what to do about it, if CUDA finds no device.
inline void require_device() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0)
    throw std::runtime_error(std::string("this is the GPU build and no GPU can be used (") + cudaGetErrorString(error) +
                             "): check nvidia-smi, build for the CPU with `make cpu`, or --plan with --cluster");
}

// Chooses this rank's device, makes it the current device of this thread, and returns its number. Collective. To be
// called before CUDA is asked for anything else, which would take memory of device 0.
inline int take_device(Control& control, bool may_share) {
  SeenDevices mine = {control.host(control.rank()), boot_id(), 0, ""};
  if (cudaGetDeviceCount(&mine.count) != cudaSuccess) mine.count = 0;
  if (mine.count > 0) {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    for (unsigned char byte : properties.uuid.bytes) mine.first += std::to_string(byte) + " ";
  }
  std::vector<SeenDevices> all;
  for (const std::string& text : control.all_gather(text_of(mine))) all.push_back(seen_devices(text));
  if (mine.count == 0) require_device();
  const DeviceChoice choice = choose_device(all, control.rank(), may_share);
  // NCCL refuses two ranks on one GPU of a host. Ranks that say they are on different hosts may share it, over sockets.
  if (choice.shared) setenv("NCCL_HOSTID", ("rank" + std::to_string(control.rank())).c_str(), 1);
  CUDA_CHECK(cudaSetDevice(choice.device));
  return choice.device;
}

// Why a pipeline might wait for ever on this device, as its environment is; empty: it does not.
inline std::string pipeline_problem() {
  CUmoduleLoadingMode mode = CU_MODULE_LAZY_LOADING;  // also if the driver does not answer
  driver_function<decltype(cuModuleGetLoadingMode)>("cuModuleGetLoadingMode", 11070)(&mode);
  if (mode != CU_MODULE_EAGER_LOADING)
    return "kernels would be loaded lazily, which may stop the stages for ever: another library has started CUDA before this "
           "program could choose; start the ranks with CUDA_MODULE_LOADING=EAGER";
  if (environment("NCCL_LAUNCH_ORDER_IMPLICIT") == "1")
    return "NCCL_LAUNCH_ORDER_IMPLICIT=1 lets messages wait for each other, which may stop the stages for ever: unset it";
  return "";
}

// Advice about the environment of a pipeline; empty: none.
inline std::string pipeline_advice() {
  const std::string queues = environment("CUDA_DEVICE_MAX_CONNECTIONS");
  if (queues != "1") return "";
  return "CUDA_DEVICE_MAX_CONNECTIONS is 1, and the streams of a pipeline share one queue, in which they wait for each "
         "other: unset it, or set 32";
}
