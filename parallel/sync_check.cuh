// `--check-sync`: do all ranks still hold the same of what is replicated? A faulty device or a missing synchronisation
// lets copies drift apart silently; checksums (kernels/statistics.cuh) of every tensor name the rank and the tensor.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/statistics.cuh"
#include "parallel/control.h"
#include "parallel/zero.cuh"
#include "runtime/error.h"

template <class T>
class SyncCheck {
 public:
  SyncCheck(Control& control, cudaStream_t stream) : control_(control), stream_(stream) {
    CUDA_CHECK(cudaMalloc(&workspace_, (1 + statistics_blocks * statistics_block) * sizeof(TensorStatistics)));
  }
  ~SyncCheck() { cudaFree(workspace_); }
  SyncCheck(const SyncCheck&) = delete;
  SyncCheck& operator=(const SyncCheck&) = delete;

  // Called by all ranks after `step` updates; fails on all of them alike.
  void run(ParameterStore<T>& store, size_t step) {
    std::vector<std::string> names;
    std::vector<uint64_t> checksums;
    store.visit_replicated([&](const TensorDescriptor& tensor, const char* what, auto* values) {
      names.push_back(tensor.name + " (" + what + ")");
      checksums.push_back(checksum(values, tensor.count()));
    });
    const std::string mine(reinterpret_cast<const char*>(checksums.data()), checksums.size() * sizeof(uint64_t));
    const std::vector<std::string> all = control_.all_gather(mine);
    for (size_t i = 0; i < names.size(); ++i) compare(names[i], i, all, step);
  }

 private:
  template <class E>
  uint64_t checksum(const E* values, size_t count) {
    tensor_statistics(workspace_, values, count, workspace_ + 1, stream_);
    TensorStatistics result;
    copy_and_wait(&result, workspace_, 1, cudaMemcpyDeviceToHost, stream_);
    return result.checksum;
  }

  void compare(const std::string& name, size_t i, const std::vector<std::string>& all, size_t step) const {
    std::map<std::string, std::vector<int>> ranks;  // by checksum
    for (int rank = 0; rank < int(all.size()); ++rank)
      ranks[all[size_t(rank)].substr(i * sizeof(uint64_t), sizeof(uint64_t))].push_back(rank);
    if (ranks.size() == 1) return;
    std::vector<std::vector<int>> groups;
    for (const auto& [checksum, members] : ranks) groups.push_back(members);
    std::sort(groups.begin(), groups.end(), [](auto& a, auto& b) { return a.size() > b.size(); });
    const bool majority = groups[0].size() > groups[1].size();
    std::string suspects;
    for (size_t group = majority ? 1 : 0; group < groups.size(); ++group)
      for (int rank : groups[group])
        suspects += (suspects.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (" + control_.host(rank) + ")";
    fail("ranks have drifted apart by step ", step, ": ", name, " on ", suspects, " differs from ",
         majority ? rank_list(groups[0]) : "one to the other",
         ": suspect a faulty device, and resume from a checkpoint without it");
  }

  Control& control_;
  cudaStream_t stream_;
  TensorStatistics* workspace_ = nullptr;
};
