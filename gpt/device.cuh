// Which device a rank takes, and the environment variables that must be set before the first call of CUDA.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt/base/error.h"
#include "gpt/device_choice.h"
#include "gpt/launch.h"
#include "gpt/ranks.h"
#include "kernels/device/check.cuh"

// Sets the variables that CUDA reads in its first call. MPI may make that call, so this comes before MPI is started.
inline void prepare_cuda(const Launch& launch) {
  // Streams that share a queue of the device wait for each other: the default is 8 queues.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  if (launch.size == 1) return;
  // Lazily loaded, a kernel may wait at its first launch until the device is idle. If a message is expected from
  // another rank, which waits for work behind this launch, both wait for ever.
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
inline int take_device(Ranks& ranks, bool may_share) {
  SeenDevices mine = {ranks.host(ranks.rank()), boot_id(), 0, ""};
  if (cudaGetDeviceCount(&mine.count) != cudaSuccess) mine.count = 0;
  if (mine.count > 0) {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    for (unsigned char byte : properties.uuid.bytes) mine.first += std::to_string(byte) + " ";
  }
  std::vector<SeenDevices> all;
  for (const std::string& text : ranks.all_gather(text_of(mine))) all.push_back(seen_devices(text));
  if (mine.count == 0) require_device();
  const DeviceChoice choice = choose_device(all, ranks.rank(), may_share);
  // NCCL refuses two ranks on one GPU of a host. Ranks that say they are on different hosts may share it, over sockets.
  if (choice.shared) setenv("NCCL_HOSTID", ("rank" + std::to_string(ranks.rank())).c_str(), 1);
  CUDA_CHECK(cudaSetDevice(choice.device));
  return choice.device;
}
