#include "training/sync_check.cuh"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "kernels/statistics.cuh"
#include "processes/error.h"

namespace {

// Device memory for the checksum of one tensor at a time.
class Checksums {
 public:
  explicit Checksums(cudaStream_t stream) : stream_(stream) {
    CUDA_CHECK(cudaMalloc(&workspace_, (1 + statistics_blocks * statistics_block) * sizeof(TensorStatistics)));
  }
  ~Checksums() { cudaFree(workspace_); }
  Checksums(const Checksums&) = delete;
  Checksums& operator=(const Checksums&) = delete;

  // The checksum of `count` elements of `bytes` bytes each, in device memory. It reads the bits only, so bf16 and fp16
  // need not be told apart.
  uint64_t operator()(const void* values, size_t count, size_t bytes) {
    if (bytes == sizeof(float)) tensor_statistics(workspace_, static_cast<const float*>(values), count, workspace_ + 1, stream_);
    else tensor_statistics(workspace_, static_cast<const __half*>(values), count, workspace_ + 1, stream_);
    TensorStatistics result;
    copy_and_wait(&result, workspace_, 1, cudaMemcpyDeviceToHost, stream_);
    return result.checksum;
  }

 private:
  cudaStream_t stream_;
  TensorStatistics* workspace_ = nullptr;
};

// Compares checksum number i of all ranks, and fails if they differ. all: for each rank its checksums of all tensors.
void compare(const Control& control, const std::string& name, size_t i, const std::vector<std::string>& all, size_t step) {
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
      suspects += (suspects.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (" + control.host(rank) + ")";
  fail("ranks have drifted apart by step ", step, ": ", name, " on ", suspects, " differs from ",
       majority ? rank_list(groups[0]) : "one to the other",
       ": suspect a faulty device, and resume from a checkpoint without it");
}

}  // namespace

void check_sync(Control& control, Parameters& parameters, size_t step, cudaStream_t stream) {
  Checksums checksum(stream);
  std::vector<std::string> names;
  std::vector<uint64_t> checksums;
  parameters.visit_replicated([&](const TensorDescriptor& tensor, const std::string& what, const void* values, size_t bytes) {
    names.push_back(tensor.name + " (" + what + ")");
    checksums.push_back(checksum(values, tensor.count(), bytes));
  });
  const std::string mine(reinterpret_cast<const char*>(checksums.data()), checksums.size() * sizeof(uint64_t));
  const std::vector<std::string> all = control.all_gather(mine);
  for (size_t i = 0; i < names.size(); ++i) compare(control, names[i], i, all, step);
}
