#include "runtime/checks/sync_check.cuh"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpt/base/error.h"
#include "gpt/base/text.h"
#include "runtime/checks/kernels/statistics.cuh"
#include "runtime/checks/replicas.cuh"

namespace {

// The checksum of a replica. It reads the bits only, so formats of one size need not be told apart. memory: 1 +
// most_sum_blocks elements.
uint64_t checksum_of(const Replica& replica, TensorStatistics* memory, cudaStream_t stream) {
  const auto compute = [&](auto* values) { tensor_statistics(memory, values, replica.count, memory + 1, stream); };
  if (replica.bytes == sizeof(float)) compute(static_cast<const float*>(replica.values));
  else if (replica.bytes == sizeof(__half)) compute(static_cast<const __half*>(replica.values));
  else compute(static_cast<const __nv_fp8_e4m3*>(replica.values));
  TensorStatistics result;
  copy_and_wait(&result, memory, 1, cudaMemcpyDeviceToHost, stream);
  return result.checksum;
}

struct Checked {
  uint64_t checksum;
  int64_t shard;
};

using RankList = std::vector<int>;

// Fails if a tensor has more than one checksum. those_with: the ranks that have each.
void compare(const Ranks& ranks, const std::string& name, const std::map<uint64_t, RankList>& those_with, size_t step) {
  if (those_with.size() == 1) return;
  std::vector<RankList> groups;
  for (const auto& [checksum, members] : those_with) groups.push_back(members);
  std::sort(groups.begin(), groups.end(), [](auto& a, auto& b) { return a.size() != b.size() ? a.size() > b.size() : a < b; });
  const bool majority = groups[0].size() > groups[1].size();
  std::string suspects;
  for (size_t group = majority ? 1 : 0; group < groups.size(); ++group)
    for (int rank : groups[group])
      suspects += (suspects.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (" + ranks.host(rank) + ")";
  fail("ranks have drifted apart by step ", step, ": ", name, " on ", suspects, " differs from ",
       majority ? rank_list(groups[0]) : "one to the other",
       ": suspect a faulty device, and resume from a checkpoint without it");
}

}  // namespace

void check_sync(Ranks& ranks, const Mesh& mesh, Parameters& parameters, size_t step, cudaStream_t stream) {
  TensorStatistics* memory = nullptr;
  CUDA_CHECK(cudaMalloc(&memory, (1 + most_sum_blocks) * sizeof(TensorStatistics)));
  const std::unique_ptr<void, decltype(&cudaFree)> owner(memory, cudaFree);
  std::vector<std::pair<std::string, const char*>> names;  // and the kind of their shards; the same on all ranks
  std::vector<Checked> mine;
  visit_replicas(parameters, mesh, [&](const Replica& replica) {
    names.emplace_back(replica.tensor.name + " (" + replica.what, replica.shards);
    const bool is_here = replica.shard != Replica::none;
    mine.push_back({is_here ? checksum_of(replica, memory, stream) : 0, replica.shard});
  });
  const std::vector<std::string> all =
      ranks.all_gather({reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Checked)});
  for (size_t i = 0; i < names.size(); ++i) {
    std::map<int64_t, std::map<uint64_t, RankList>> those_with;  // by shard and checksum
    for (int rank = 0; rank < int(all.size()); ++rank) {
      Checked its;
      std::memcpy(&its, all[size_t(rank)].data() + i * sizeof its, sizeof its);
      if (its.shard != Replica::none) those_with[its.shard][its.checksum].push_back(rank);
    }
    const auto& [name, shards] = names[i];
    for (const auto& [shard, by_checksum] : those_with)
      compare(ranks, name + (shards ? std::string(", ") + shards + " " + std::to_string(shard) : "") + ")", by_checksum, step);
  }
}
