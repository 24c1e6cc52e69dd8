// The mesh: this rank's place among all, its device, and the groups it talks to.
//
// Order of the axes, fastest first: tp, cp, dp, pp (tensor, context, data and pipeline parallelism), so that tensor
// parallel ranks are neighbours on one node. So far every axis but dp has one rank.
//
// The GPU of a rank comes from its place among the ranks of its host, or is the only one that the launcher lets it see.
#pragma once

#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "parallel/collectives.cuh"
#include "parallel/control.h"

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

// What a rank sees of its host's devices, and which of them it takes.
class RankDevice {
 public:
  RankDevice(Control& control, bool share) {
    const cudaError_t error = cudaGetDeviceCount(&devices_);
    const bool usable = error == cudaSuccess && devices_ > 0;
    std::string mine = std::to_string(usable ? devices_ : 0);
    if (usable) {
      cudaDeviceProp properties;
      CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
      mine += std::string(properties.uuid.bytes, sizeof properties.uuid.bytes);
    }
    const std::vector<std::string> all = control.all_gather(mine);
    if (!usable)
      throw std::runtime_error(std::string("this is the GPU build and no GPU can be used (") + cudaGetErrorString(error) +
                               "): check nvidia-smi, or build for the CPU with `make cpu`");
    for (int rank = 0; rank < control.size(); ++rank) {
      if (control.host(rank) != control.host(control.rank())) continue;
      if (rank == control.rank()) local_rank_ = local_ranks_;
      ++local_ranks_;
      distinct_.insert(all[rank]);
    }
    choose(control, share);
    CUDA_CHECK(cudaSetDevice(device_));
  }

  int device() const { return device_; }
  int local_rank() const { return local_rank_; }
  int local_ranks() const { return local_ranks_; }

 private:
  void choose(const Control& control, bool share) {
    if (devices_ == 1 && int(distinct_.size()) == local_ranks_) return;  // one each, given by the launcher
    if (local_ranks_ > devices_ && !share)
      throw std::runtime_error(control.host(control.rank()) + " has " + std::to_string(local_ranks_) + " ranks and " +
                               std::to_string(devices_) + " GPU" + (devices_ > 1 ? "s" : "") +
                               ": start fewer ranks there, or let them share with --share-gpu (slow; for tests)");
    device_ = local_rank_ % devices_;
    // NCCL refuses two ranks on one GPU of a host; ranks that claim hosts of their own may share it, over sockets.
    if (local_ranks_ > devices_) setenv("NCCL_HOSTID", ("rank" + std::to_string(control.rank())).c_str(), 1);
  }

  int devices_ = 0, device_ = 0, local_rank_ = 0, local_ranks_ = 0;
  std::set<std::string> distinct_;
};

class Mesh {
 public:
  // `recorder` outlives the mesh.
  Mesh(Control& control, const MeshShape& shape, bool share_gpu, FlightRecorder& recorder)
      : shape_(shape), place_(place_of(control.rank(), shape)), device_(control, share_gpu), recorder_(recorder) {
    if (control.size() == 1) {
      dp_ = std::make_unique<Communicator>();
      return;
    }
    ncclUniqueId id{};
    if (control.rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    const std::string of_rank_0 = control.all_gather(std::string(id.internal, sizeof id.internal))[0];
    std::memcpy(id.internal, of_rank_0.data(), sizeof id.internal);
    ncclComm_t world = nullptr;
    NCCL_CHECK(ncclCommInitRank(&world, control.size(), id, control.rank()));
    dp_ = std::make_unique<Communicator>(world, recorder);
    recorder.set_refresh([this] { dp_->refresh(); });
  }
  ~Mesh() { recorder_.set_refresh(nullptr); }
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  const MeshShape& shape() const { return shape_; }
  const MeshPlace& place() const { return place_; }
  const RankDevice& device() const { return device_; }
  Communicator& dp() { return *dp_; }

 private:
  MeshShape shape_;
  MeshPlace place_;
  RankDevice device_;
  FlightRecorder& recorder_;
  std::unique_ptr<Communicator> dp_;
};
