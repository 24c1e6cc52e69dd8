// The mesh: this rank's place among all ranks, its device, and the groups that it communicates with.
//
// Order of the axes, fastest first: tp, cp, dp, pp (tensor, context, data and pipeline parallelism), so that tensor
// parallel ranks are neighbours on one node. So far every axis except dp has one rank.
#pragma once

#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parallel/collectives.cuh"
#include "processes/control.h"
#include "processes/device_choice.h"

struct MeshShape {
  int tp = 1, cp = 1, dp = 1, pp = 1;
  int ranks() const { return tp * cp * dp * pp; }
};

struct MeshPlace {
  int tp, cp, dp, pp;
};

inline MeshPlace place_of(int rank, const MeshShape& shape) {
  return {rank % shape.tp, rank / shape.tp % shape.cp, rank / (shape.tp * shape.cp) % shape.dp,
          rank / (shape.tp * shape.cp * shape.dp)};
}

// Chooses this rank's device, makes it the current device of this thread, and returns its number. Collective.
inline int take_device(Control& control, bool may_share) {
  SeenDevices mine = {control.host(control.rank()), boot_id(), 0, ""};
  const cudaError_t error = cudaGetDeviceCount(&mine.count);
  if (error != cudaSuccess) mine.count = 0;
  if (mine.count > 0) {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    for (unsigned char byte : properties.uuid.bytes) mine.first += std::to_string(byte) + " ";
  }
  std::vector<SeenDevices> all;
  for (const std::string& text : control.all_gather(text_of(mine))) all.push_back(seen_devices(text));
  if (mine.count == 0)
    throw std::runtime_error(std::string("this is the GPU build and no GPU can be used (") + cudaGetErrorString(error) +
                             "): check nvidia-smi, or build for the CPU with `make cpu`");
  const DeviceChoice choice = choose_device(all, control.rank(), may_share);
  // NCCL refuses two ranks on one GPU of a host. Ranks that say they are on different hosts may share it, over sockets.
  if (choice.shared) setenv("NCCL_HOSTID", ("rank" + std::to_string(control.rank())).c_str(), 1);
  CUDA_CHECK(cudaSetDevice(choice.device));
  return choice.device;
}

class Mesh {
 public:
  // `control` and `recorder` outlive the mesh.
  Mesh(Control& control, const MeshShape& shape, bool share_gpu, FlightRecorder& recorder)
      : shape_(shape), place_(place_of(control.rank(), shape)), device_(take_device(control, share_gpu)) {
    if (control.size() == 1) {
      dp_ = std::make_unique<Communicator>();
      return;
    }
    // Sums that NVSwitch makes (NVLS) are not the same bits in every call: https://github.com/NVIDIA/nccl/issues/1497
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    ncclUniqueId id{};
    if (control.rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    const std::string of_rank_0 = control.all_gather(std::string(id.internal, sizeof id.internal))[0];
    std::memcpy(id.internal, of_rank_0.data(), sizeof id.internal);
    ncclComm_t world = nullptr;
    const uint64_t sequence = recorder.enter("ncclCommInitRank", 0);
    NCCL_CHECK(ncclCommInitRank(&world, control.size(), id, control.rank()));
    recorder.leave(sequence);
    dp_ = std::make_unique<Communicator>(world, recorder);
    caretaker_ = std::jthread([this, &control](std::stop_token stop) { look_after(control, stop); });
    connect();
  }
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  const MeshShape& shape() const { return shape_; }
  const MeshPlace& place() const { return place_; }
  int device() const { return device_; }
  Communicator& dp() { return *dp_; }

 private:
  // Calls each collective once. NCCL takes memory for a collective at its first call, and the model must see how much
  // is left after that (kernels/device/memory.cuh).
  void connect() {
    float* data = nullptr;
    const size_t ranks = size_t(dp_->size());
    CUDA_CHECK(cudaMalloc(&data, ranks * sizeof(float)));
    CUDA_CHECK(cudaMemset(data, 0, ranks * sizeof(float)));
    dp_->after(nullptr);
    dp_->all_reduce(data, ranks);
    dp_->reduce_scatter(data + dp_->rank(), data, 1);
    dp_->all_gather(data, data + dp_->rank(), 1);
    dp_->broadcast(data, ranks, 0);
    CUDA_CHECK(cudaStreamSynchronize(dp_->stream()));
    CUDA_CHECK(cudaFree(data));
  }

  // Asks the device again and again which collectives have finished. This has a thread of its own, because a driver
  // that is stuck may not answer, and heartbeats must go on even then.
  void look_after(Control& control, const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any sleep;
    try {
      CUDA_CHECK(cudaSetDevice(device_));
      while (!stop.stop_requested()) {
        dp_->refresh();
        std::unique_lock lock(mutex);
        sleep.wait_for(lock, stop, std::chrono::milliseconds(200), [] { return false; });
      }
    } catch (const std::exception& error) {
      control.fail(error.what());
    }
  }

  MeshShape shape_;
  MeshPlace place_;
  int device_;
  std::unique_ptr<Communicator> dp_;
  std::jthread caretaker_;  // declared last, so that it ends before the other members are destroyed
};
