#include "runtime/checks/rank_check.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include "gpt/base/error.h"
#include "gpt/base/text.h"
#include "kernels/cast.cuh"
#include "kernels/linear.cuh"
#include "kernels/random.cuh"

namespace {

// NCCL's log of this process, from which it is removed as soon as it has been read.
std::string log_path() {
  return std::filesystem::temp_directory_path() / ("gpt_nccl_" + std::to_string(getpid()) + ".log");
}

// "Using network IB": the last line of this kind in NCCL's log.
std::string network_name() {
  constexpr std::string_view before = "Using network ";
  std::ifstream log(log_path());
  std::string name;
  for (std::string line; std::getline(log, line);)
    if (const size_t found = line.find(before); found != line.npos) name = line.substr(found + before.size());
  std::error_code none;
  std::filesystem::remove(log_path(), none);
  return name;
}

constexpr size_t bytes = 64 << 20, link_bytes = 16 << 20;

// Random numbers: with zeros a processor draws so little power that it would not show its limits.
template <class Float>
void fill(Float* data, float* wide, cudaStream_t stream) {
  const size_t count = bytes / sizeof(float);
  fill_random(wide, 0, count, 1, 1.0f, stream);
  if constexpr (std::is_same_v<Float, float>)
    CUDA_CHECK(cudaMemcpyAsync(data, wide, bytes, cudaMemcpyDeviceToDevice, stream));
  else cast(data, wide, count, stream);
}

double time_links(const Job& job, char* memory) {
  const int rank = job.ranks.rank(), size = job.ranks.size();
  double seconds = INFINITY;
  CUDA_CHECK(cudaStreamSynchronize(job.stream));
  const std::unique_ptr<Communicator> all = job.mesh.temporary_world();
  for (int first = 0; first < size; ++first) {
    const int second = (first + 1) % size, peer = rank == first ? second : first;
    if (rank == first || rank == second) {
      const double time = best_seconds(all->stream(), [&] {
        all->send_receive(memory, peer, memory + bytes, peer, link_bytes);
      });
      if (rank == first) seconds = time;
    }
    job.ranks.barrier();
  }
  return link_bytes / seconds;
}

// Names the speeds of this rank that are slow: below 0.8 of the median of all ranks.
std::string remarks(const std::vector<RankSpeed>& speeds, size_t rank) {
  std::string text;
  const std::pair<const char*, double RankSpeed::*> kinds[] = {
      {"arithmetic", &RankSpeed::product}, {"memory", &RankSpeed::copy}, {"link", &RankSpeed::link}};
  for (const auto& [name, kind] : kinds) {
    std::vector<double> values;
    for (const RankSpeed& speed : speeds) values.push_back(speed.*kind);
    if (speeds[rank].*kind / median(values) < 0.8) text += std::string("   slow ") + name;
  }
  return text;
}

void report(const Ranks& ranks, const std::vector<std::string>& all, const std::string& network, bool refuses) {
  std::vector<RankSpeed> speeds(all.size());
  std::vector<double> links;
  std::vector<std::string> hosts;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    std::memcpy(&speeds[rank], all[rank].data(), sizeof(RankSpeed));
    links.push_back(speeds[rank].link), hosts.push_back(ranks.host(int(rank)));
  }
  std::printf("%-32s %14s %14s %20s\n", "rank", "TFLOP/s", "copy GB/s", "link to next GB/s");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string name = std::to_string(rank) + " (" + hosts[rank] + ")";
    std::printf("%-32s %14.2f %14.1f ", name.c_str(), speeds[rank].product / 1e12, speeds[rank].copy / 1e9);
    if (all.size() > 1) std::printf("%20.2f%s\n", links[rank] / 1e9, remarks(speeds, rank).c_str());
    else std::printf("%20s\n", "none");
  }
  if (!network.empty()) std::printf("network  %s\n", network.c_str());
  std::fflush(stdout);
  if (!refuses || is_cpu_device) return;  // CPUs compute slowly enough for slow links
  const std::string problem = network_problem(links, hosts, network);
  if (!problem.empty()) fail("--check-ranks: ", problem);
}

template <class Float>
RankSpeed check(const Job& job, bool refuses) {
  char* memory = nullptr;
  CUDA_CHECK(cudaMalloc(&memory, 2 * bytes));
  const auto release = [](char* taken) { use_gemm_workspace(nullptr), cudaFree(taken); };
  const std::unique_ptr<char, decltype(release)> owner(memory, release);
  RankSpeed mine;
  Float* data = reinterpret_cast<Float*>(memory);
  const int n = 2048;
  // First: NCCL connects neighbours here, best before any kernel.
  mine.link = job.is_alone() ? 0 : time_links(job, memory);
  const std::string network = network_name();
  fill(data, reinterpret_cast<float*>(memory + bytes), job.stream);
  use_gemm_workspace(memory + bytes);  // the model's is not there yet
  mine.product = 2.0 * n * n * n / best_seconds(job.stream, [&] {
    linear_forward<Float>(data, data + n * n, data + 2 * n * n, nullptr, n, n, n, job.stream);
  });
  mine.copy = 2.0 * bytes / best_seconds(job.stream, [&] {
    CUDA_CHECK(cudaMemcpyAsync(memory, memory + bytes, bytes, cudaMemcpyDeviceToDevice, job.stream));
  });
  std::string text(sizeof mine, 0);
  std::memcpy(text.data(), &mine, sizeof mine);
  report(job.ranks, job.ranks.all_gather(text), network, refuses);
  return mine;
}

}  // namespace

void note_network() {
  if (std::getenv("NCCL_DEBUG") || std::getenv("NCCL_DEBUG_FILE")) return;
  setenv("NCCL_DEBUG_FILE", log_path().c_str(), 1);
  setenv("NCCL_DEBUG", "INFO", 1);
  setenv("NCCL_DEBUG_SUBSYS", "INIT,NET", 0);
}

std::string network_problem(const std::vector<double>& links, const std::vector<std::string>& hosts, const std::string& network) {
  constexpr double least = 5e9;
  for (size_t rank = 0; rank < links.size(); ++rank) {
    const size_t next = (rank + 1) % links.size();
    if (hosts[rank] == hosts[next] || links[rank] >= least) continue;
    return formatted("rank %zu (host %s) sends %.2g GB/s to rank %zu (host %s), and training over hosts needs 5: NCCL uses %s; "
                     "install the network's plugin, or choose the interface with NCCL_SOCKET_IFNAME or NCCL_IB_HCA, or leave out --check-ranks",
                     rank, hosts[rank].c_str(), links[rank] / 1e9, next, hosts[next].c_str(),
                     network.empty() ? "a network that NCCL_DEBUG=INFO names" : ("the network " + network).c_str());
  }
  return "";
}

RankSpeed check_ranks(const Job& job, const std::string& dtype, bool refuses) {
  if (dtype == "fp32") return check<float>(job, refuses);
  if (dtype == "bf16") return check<__nv_bfloat16>(job, refuses);
  return check<__half>(job, refuses);
}
