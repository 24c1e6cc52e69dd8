// The ranks that run a ladder together: the messages between them, counted, and how long work takes that all of them do
// at the same time.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "dev/ladders/measure.cuh"
#include "gpt/mesh.cuh"

namespace ladder {

class World {
 public:
  World(Ranks& ranks, bool share_gpu) : ranks_(ranks) {
    take_device(ranks, share_gpu);
    ncclUniqueId id{};
    if (rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    const std::string of_rank_0 = ranks.all_gather(std::string(id.internal, sizeof id.internal))[0];
    std::memcpy(id.internal, of_rank_0.data(), sizeof id.internal);
    NCCL_CHECK(ncclCommInitRank(&comm_, size(), id, rank()));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~World() {
    if (std::uncaught_exceptions() > 0) return;  // other ranks may wait for this one, which cannot come: the job ends (run_ranks)
    cudaStreamSynchronize(stream_);
    ncclCommDestroy(comm_);
    cudaStreamDestroy(stream_);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return ranks_.rank(); }
  int size() const { return ranks_.size(); }
  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }

  // ---- messages

  // All messages that issue() sends and receives are under way at the same time: one step.
  template <class Issue>
  void step(Issue issue) {
    NCCL_CHECK(ncclGroupStart());
    issue();
    NCCL_CHECK(ncclGroupEnd());
  }
  void send(const void* data, size_t bytes, int to) {
    if (bytes == 0) return;
    sent_ += bytes;
    NCCL_CHECK(ncclSend(data, bytes, ncclUint8, to, comm_, stream_));
  }
  void receive(void* data, size_t bytes, int from) {
    if (bytes > 0) NCCL_CHECK(ncclRecv(data, bytes, ncclUint8, from, comm_, stream_));
  }
  size_t sent() const { return sent_; }  // bytes of this rank so far

  // ---- functions that all ranks must call together

  // Gathers `mine` from every rank, in the order of ranks.
  std::vector<std::string> all(const std::string& mine) { return ranks_.all_gather(mine); }

  // The largest of each value among all ranks.
  std::vector<double> largest(const std::vector<double>& mine) {
    Buffer<double> values(mine);
    NCCL_CHECK(ncclAllReduce(values, values, mine.size(), ncclFloat64, ncclMax, comm_, stream_));
    return values.get();
  }
  double largest(double mine) { return largest(std::vector<double>{mine})[0]; }

  // The seconds of one work() on the slowest rank. A round begins on all ranks at once, after prepare(), and calls
  // work() as often as takes 20 milliseconds, but at most 16 times: sums of sums of sums soon exceed every format.
  template <class Prepare, class Work>
  Times time(Prepare prepare, Work work) {
    constexpr size_t rounds = 21;
    Buffer<float> barrier(std::vector<float>(1));
    const auto round = [&](size_t calls) {
      prepare();
      NCCL_CHECK(ncclAllReduce(barrier, barrier, 1, ncclFloat, ncclSum, comm_, stream_));
      return ceilings::seconds(calls, stream_, work);
    };
    round(1);
    const size_t calls = size_t(std::clamp(20e-3 / largest(round(1)), 1.0, 16.0));
    std::vector<double> times;
    while (times.size() < rounds) times.push_back(round(calls));
    times = largest(times);
    std::sort(times.begin(), times.end());
    return {times[rounds / 2], times[rounds / 10], times[rounds - 1 - rounds / 10]};
  }

 private:
  Ranks& ranks_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  size_t sent_ = 0;
};

}  // namespace ladder
