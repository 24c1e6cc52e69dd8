// Collectives between the ranks of one group, by NCCL (on the CPU device: cpu/nccl.h), on a stream of their own.
// Every call is counted, timed, profiled and written to the flight recorder; with one rank there is nothing to do.
//
// Bytes that each of N ranks sends, of a buffer of S bytes (Patarasuk and Yuan, 2009: no algorithm sends fewer):
//   all_reduce 2·(N−1)/N·S     reduce_scatter, all_gather (N−1)/N·S     broadcast S on average
#pragma once

#include <nccl.h>

#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <string>

#include "kernels/device/common.cuh"
#include "kernels/device/event.cuh"
#include "processes/flight_recorder.h"

#define NCCL_CHECK(call) check_nccl((call), #call)

inline void check_nccl(ncclResult_t result, const char* call) {
  if (result == ncclSuccess) return;
  throw std::runtime_error(std::string(call, std::strcspn(call, "(")) + ": " + ncclGetErrorString(result) + ": " +
                           ncclGetLastError(nullptr));
}

template <class T>
constexpr ncclDataType_t nccl_type = std::is_same_v<T, float>           ? ncclFloat32
                                     : std::is_same_v<T, double>        ? ncclFloat64
                                     : std::is_same_v<T, __nv_bfloat16> ? ncclBfloat16
                                     : std::is_same_v<T, __half>        ? ncclFloat16
                                     : std::is_same_v<T, int>           ? ncclInt32
                                     : std::is_same_v<T, uint64_t>      ? ncclUint64
                                                                        : ncclUint8;  // bytes

// Of one rank.
struct Traffic {
  std::map<std::string, double> bytes_sent;  // by collective
  double milliseconds = 0;                   // in collectives, the wait for other ranks included
  double exposed_milliseconds = 0;           // the part in which the compute stream stood still
};

class Communicator {
 public:
  // One rank alone.
  Communicator() = default;
  // Takes over `comm`. Its collectives enter `recorder`.
  Communicator(ncclComm_t comm, FlightRecorder& recorder) : comm_(comm), recorder_(&recorder) {
    NCCL_CHECK(ncclCommCount(comm, &size_));
    NCCL_CHECK(ncclCommUserRank(comm, &rank_));
    int least = 0, greatest = 0;  // else NCCL's few blocks would queue behind all those of a matrix product
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    Profiler::instance().name_stream(stream_, "communication");
  }
  ~Communicator() {
    if (!comm_) return;
    cudaStreamSynchronize(stream_);
    ncclCommDestroy(comm_);
    cudaStreamDestroy(stream_);
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  cudaStream_t stream() const { return stream_; }  // where all collectives run; null with one rank

  // data (count) of each rank becomes the sum (or another reduction) over the ranks.
  template <class T>
  void all_reduce(T* data, size_t count, ncclRedOp_t operation = ncclSum) {
    run("all_reduce", count * sizeof(T), 2 * others(), data, count, [&] {
      return ncclAllReduce(data, data, count, nccl_type<T>, operation, comm_, stream_);
    });
  }

  // receive (count) = piece number rank() of the sum of all ranks' send (size()·count). In place where receive is that
  // piece of send.
  template <class T>
  void reduce_scatter(T* receive, const T* send, size_t count, ncclRedOp_t operation = ncclSum) {
    run("reduce_scatter", size_ * count * sizeof(T), others(), receive, count, [&] {
      return ncclReduceScatter(send, receive, count, nccl_type<T>, operation, comm_, stream_);
    });
  }

  // receive (size()·count) = send (count) of all ranks, in rank order. In place where send is piece rank() of receive.
  template <class T>
  void all_gather(T* receive, const T* send, size_t count) {
    run("all_gather", size_ * count * sizeof(T), others(), receive, size_ * count, [&] {
      return ncclAllGather(send, receive, count, nccl_type<T>, comm_, stream_);
    });
  }

  // data (count) of every rank = data of rank `root`.
  template <class T>
  void broadcast(T* data, size_t count, int root) {
    run("broadcast", count * sizeof(T), rank_ == root ? size_ - 1 : 0, data, count, [&] {
      return ncclBroadcast(data, data, count, nccl_type<T>, root, comm_, stream_);
    });
  }

  // Both ends at once, so that rings and pairs don't wait for each other.
  template <class T>
  void send_receive(const T* send, int to, T* receive, int from, size_t count) {
    run("send_receive", count * sizeof(T), 1, receive, count, [&] {
      NCCL_CHECK(ncclGroupStart());
      NCCL_CHECK(ncclSend(send, count, nccl_type<T>, to, comm_, stream_));
      NCCL_CHECK(ncclRecv(receive, count, nccl_type<T>, from, comm_, stream_));
      return ncclGroupEnd();
    });
  }

  // Collectives issued from now on come after what `stream` has been given so far.
  void after(cudaStream_t stream) {
    if (size_ == 1) return;
    order_.record(stream);
    CUDA_CHECK(cudaStreamWaitEvent(stream_, order_));
  }

  // `stream` goes on when `event` has been recorded; the time it stands still is exposed communication.
  void wait(cudaStream_t stream, const Event& event) {
    if (size_ == 1) return;
    std::lock_guard lock(mutex_);
    std::list<Timed> waiting = unused();
    waiting.front().start.record(stream);
    CUDA_CHECK(cudaStreamWaitEvent(stream, event));
    waiting.front().end.record(stream);
    waits_.splice(waits_.end(), waiting);
  }
  // The same for all that has been issued here.
  void wait_for_all(cudaStream_t stream) {
    if (size_ == 1) return;
    order_.record(stream_);
    wait(stream, order_);
  }

  // What is sent from now on counts together; a number for take_traffic.
  int begin_traffic() {
    std::lock_guard lock(mutex_);
    return ++count_;
  }

  // What was sent under this number, and how long that took as far as it has finished. Earlier numbers are forgotten.
  Traffic take_traffic(int number) {
    std::lock_guard lock(mutex_);
    collect_finished();
    const Traffic taken = traffic_[number];
    traffic_.erase(traffic_.begin(), traffic_.upper_bound(number));
    return taken;
  }

  // Tells the flight recorder what has finished, and throws what NCCL has noticed since. For the thread that looks
  // after the mesh.
  void refresh() {
    ncclResult_t error = ncclSuccess;
    if (comm_) NCCL_CHECK(ncclCommGetAsyncError(comm_, &error));
    if (error != ncclInProgress) check_nccl(error, "a collective under way");
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) collect_finished();
  }

 private:
  struct Timed {
    Event start{cudaEventDefault}, end{cudaEventDefault};
    uint64_t sequence = 0;  // the flight recorder's
    int count = 0;          // the traffic's number
  };

  double others() const { return double(size_ - 1) / size_; }

  // bytes: of the buffer, the same on every rank, as the flight recorder wants it; this rank sends `share` of them, and
  // will have written `written` (count).
  template <class T, class Issue>
  void run(const char* name, size_t bytes, double share, const T* written, size_t count, Issue issue) {
    if (size_ == 1) return;
    std::lock_guard lock(mutex_);
    collect_finished();
    std::list<Timed> call = unused();
    call.front().sequence = recorder_->enter(name, bytes);
    KernelRange range(name, stream_, share * double(bytes), 0);
    call.front().start.record(stream_);
    check_nccl(issue(), name);
    call.front().end.record(stream_);
    pending_.splice(pending_.end(), call);
    traffic_[count_].bytes_sent[name] += share * double(bytes);
    if constexpr (std::is_same_v<T, float> || sizeof(T) == 2) range.writes(written, count);
  }

  // One that is not in use.
  std::list<Timed> unused() {
    std::list<Timed> one;
    if (free_.empty()) one.emplace_back();
    else one.splice(one.end(), free_, free_.begin());
    one.front().count = count_;
    return one;
  }

  void collect_finished() {
    while (!pending_.empty() && is_ready(pending_.front().end)) {
      recorder_->leave(pending_.front().sequence);
      traffic_[pending_.front().count].milliseconds += elapsed_ms(pending_.front().start, pending_.front().end);
      free_.splice(free_.end(), pending_, pending_.begin());
    }
    while (!waits_.empty() && is_ready(waits_.front().end)) {
      traffic_[waits_.front().count].exposed_milliseconds += elapsed_ms(waits_.front().start, waits_.front().end);
      free_.splice(free_.end(), waits_, waits_.begin());
    }
  }

  ncclComm_t comm_ = nullptr;
  FlightRecorder* recorder_ = nullptr;
  int rank_ = 0, size_ = 1;
  cudaStream_t stream_ = nullptr;
  Event order_;
  std::mutex mutex_;  // of what refresh() reads too
  std::list<Timed> pending_, waits_, free_;
  int count_ = 0;
  std::map<int, Traffic> traffic_;
};
