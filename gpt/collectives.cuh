// Collectives between the ranks of one group, by NCCL (on the CPU device: cpu/nccl.h), on a stream that groups may
// share (mesh.cuh). Every call is counted, profiled and written to the log of calls; in some steps it is timed, too.
// With one rank every call returns at once.
//
// Each call of CUDA's runtime takes the host time, and it must issue a layer in less time than the device needs for it.
// So a collective that is not timed records one event, when it ends: streams wait for this event, and it tells the
// log that the collective has finished.
//
// Bytes that each of N ranks sends for a buffer of S bytes (Patarasuk and Yuan, 2009: no algorithm sends fewer):
//   all_reduce 2·(N−1)/N·S     reduce_scatter, all_gather, all_to_all (N−1)/N·S     broadcast S on average     send S
// Its events are tested by test_context_parallel, test_zero, test_tensor_parallel, test_meshes.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gpt/ranks.h"
#include "kernels/device/common.cuh"
#include "kernels/device/event.cuh"

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

// The bytes that one rank has sent, and how long that took.
struct Traffic {
  std::map<std::string, double> bytes_sent;  // by collective
  bool is_timed = false;                     // if not, the other two say nothing
  double milliseconds = 0;                   // of the collectives that were waited for, the wait for other ranks included
  double exposed_milliseconds = 0;           // how long the compute stream waited for them
};

// An array that is added up over ranks.
struct Summed {
  template <class T>
  Summed(T* data, size_t count) : data(data), count(count), bytes(count * sizeof(T)), type(nccl_type<T>) {}
  void* data;
  size_t count, bytes;
  ncclDataType_t type;
};

// NCCL's communicator. Groups of the same ranks, on the same stream, may share one.
using NcclComm = std::shared_ptr<std::remove_pointer_t<ncclComm_t>>;

class Communicator {
 public:
  // A group of one rank.
  Communicator() = default;
  // group: a string literal, the name of the group in metrics and in the log of calls. `stream` outlives this
  // object.
  Communicator(const char* group, NcclComm comm, cudaStream_t stream, CallLog& calls)
      : group_(group), comm_(std::move(comm)), calls_(&calls), stream_(stream) {
    NCCL_CHECK(ncclCommCount(comm_.get(), &size_));
    NCCL_CHECK(ncclCommUserRank(comm_.get(), &rank_));
  }
  // A group that is only imagined: it has a size, and this rank a place in it, but nothing can be sent.
  Communicator(const char* group, int size, int rank) : group_(group), rank_(rank), size_(size) {}
  ~Communicator() {
    if (!comm_ || cudaStreamSynchronize(stream_) != cudaSuccess) return;
    std::lock_guard lock(mutex_);
    for (const Pending& one : pending_) calls_->leave(one.sequence);  // nobody else would
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const char* group() const { return group_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  cudaStream_t stream() const { return stream_; }  // all collectives run on it; null with one rank

  // On every rank, data (count) becomes the sum (or another reduction) over the ranks.
  template <class T>
  void all_reduce(T* data, size_t count, ncclRedOp_t operation = ncclSum) {
    run("all_reduce", count * sizeof(T), 2 * others(), data, count, [&] {
      return ncclAllReduce(data, data, count, nccl_type<T>, operation, comm_.get(), stream_);
    });
  }

  // Adds up several small arrays, of any types, in one operation: usually one kernel of NCCL, and an entry of the
  // log. The first array is of floats (--trace-tensors shows no other). No array: does nothing.
  void all_reduce(const std::vector<Summed>& arrays) {
    if (arrays.empty()) return;
    size_t bytes = 0;
    for (const Summed& array : arrays) bytes += array.bytes;
    run("all_reduce", bytes, 2 * others(), static_cast<float*>(arrays[0].data), arrays[0].count, [&] {
      NCCL_CHECK(ncclGroupStart());
      for (const auto& [data, count, _, type] : arrays)
        NCCL_CHECK(ncclAllReduce(data, data, count, type, ncclSum, comm_.get(), stream_));
      return ncclGroupEnd();
    });
  }

  // receive (count) = piece number rank() of the sum over all ranks of send (size()·count). Works in place if receive
  // is that piece of send.
  template <class T>
  void reduce_scatter(T* receive, const T* send, size_t count, ncclRedOp_t operation = ncclSum) {
    run("reduce_scatter", size_ * count * sizeof(T), others(), receive, count, [&] {
      return ncclReduceScatter(send, receive, count, nccl_type<T>, operation, comm_.get(), stream_);
    });
  }

  // receive (size()·count) = send (count) of all ranks, in rank order. Works in place if send is piece number rank() of
  // receive.
  template <class T>
  void all_gather(T* receive, const T* send, size_t count) {
    run("all_gather", size_ * count * sizeof(T), others(), receive, size_ * count, [&] {
      return ncclAllGather(send, receive, count, nccl_type<T>, comm_.get(), stream_);
    });
  }

  // On every rank, data (count) becomes the data of rank `root`.
  template <class T>
  void broadcast(T* data, size_t count, int root) {
    run("broadcast", count * sizeof(T), rank_ == root ? size_ - 1 : 0, data, count, [&] {
      return ncclBroadcast(data, data, count, nccl_type<T>, root, comm_.get(), stream_);
    });
  }

  // Sends to one rank and receives from another in one operation, so that ranks in a ring or a pair don't wait for each
  // other forever.
  template <class T>
  void send_receive(const T* send, int to, T* receive, int from, size_t count) {
    run("send_receive", count * sizeof(T), 1, receive, count, [&] {
      NCCL_CHECK(ncclGroupStart());
      NCCL_CHECK(ncclSend(send, count, nccl_type<T>, to, comm_.get(), stream_));
      NCCL_CHECK(ncclRecv(receive, count, nccl_type<T>, from, comm_.get(), stream_));
      return ncclGroupEnd();
    });
  }

  // receive (size(), count) = the messages of all ranks to this one, in rank order: every rank sends message number r of
  // send (size(), count) to rank r, and copies its own.
  template <class T>
  void all_to_all(T* receive, const T* send, size_t count) {
    const size_t all = size_t(size_) * count;
    run("all_to_all", all * sizeof(T), others(), receive, all, [&] {
      CUDA_CHECK(cudaMemcpyAsync(receive + rank_ * count, send + rank_ * count, count * sizeof(T), cudaMemcpyDeviceToDevice,
                                 stream_));
      NCCL_CHECK(ncclGroupStart());
      for (int step = 1; step < size_; ++step) {
        const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
        NCCL_CHECK(ncclSend(send + to * count, count, nccl_type<T>, to, comm_.get(), stream_));
        NCCL_CHECK(ncclRecv(receive + from * count, count, nccl_type<T>, from, comm_.get(), stream_));
      }
      return ncclGroupEnd();
    });
  }

  // Sends to rank `to`, which calls receive() with the same count. A send may last until then.
  template <class T>
  void send(const T* data, size_t count, int to) {
    run("send", count * sizeof(T), 1, data, 0, [&] {
      return ncclSend(data, count, nccl_type<T>, to, comm_.get(), stream_);
    });
  }
  template <class T>
  void receive(T* data, size_t count, int from) {
    run("receive", count * sizeof(T), 0, data, count, [&] {
      return ncclRecv(data, count, nccl_type<T>, from, comm_.get(), stream_);
    });
  }

  // Collectives issued from now on start after all work that `stream` has been given so far.
  void after(cudaStream_t stream) {
    if (size_ == 1) return;
    order_.record(stream);
    CUDA_CHECK(cudaStreamWaitEvent(stream_, order_));
  }

  // Makes `stream` wait for `event`. The time that it waits counts as exposed communication.
  void wait(cudaStream_t stream, const Event& event) {
    if (size_ == 1) return;
    std::lock_guard lock(mutex_);
    wait_for(stream, event);
  }

  // The number of the last collective that has been issued. The first one has number 1.
  uint64_t last() const { return issued_; }
  // Makes `stream` wait for this collective, and for all before it.
  void wait(cudaStream_t stream, uint64_t collective) {
    if (size_ == 1) return;
    std::lock_guard lock(mutex_);
    const uint64_t later = issued_ - collective;  // the number of collectives after it
    if (later < pending_.size()) wait_for(stream, *pending_[pending_.size() - 1 - later].end);  // else it has finished
  }

  // Makes `stream` wait for all that the communication stream has been given so far.
  void wait_for_all(cudaStream_t stream) {
    if (size_ == 1) return;
    order_.record(stream_);
    wait(stream, order_);
  }

  // Starts a new count of the bytes sent, and times the collectives if `timed`. Returns the count's number, for take_traffic.
  int begin_traffic(bool timed = true) {
    std::lock_guard lock(mutex_);
    traffic_[++count_].is_timed = is_timed_ = timed;
    return count_;
  }

  // Returns the bytes sent under this number, and how long its finished collectives took. Drops earlier numbers.
  Traffic take_traffic(int number) {
    std::lock_guard lock(mutex_);
    collect_finished();
    Traffic taken = traffic_[number];
    // A wait may also last while no timed collective runs: until it starts, and for one of a count that was not timed.
    taken.milliseconds = std::max(taken.milliseconds, taken.exposed_milliseconds);
    traffic_.erase(traffic_.begin(), traffic_.upper_bound(number));
    return taken;
  }

  // Tells the log of calls which collectives have finished, and throws if NCCL has found an error since the last
  // call. For the mesh's own thread (mesh.cuh).
  void refresh() {
    ncclResult_t error = ncclSuccess;
    if (comm_) NCCL_CHECK(ncclCommGetAsyncError(comm_.get(), &error));
    if (error != ncclInProgress) check_nccl(error, "a collective under way");
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) collect_finished();
  }

 private:
  // A collective, or a wait for one, that the device may not have finished.
  struct Pending {
    int count;                          // number of the traffic count it belongs to
    std::unique_ptr<Event> start, end;  // start: null if it is not timed
    uint64_t sequence = 0;              // number of the call in the log
  };

  double others() const { return double(size_ - 1) / size_; }

 protected:
  // Issues one collective. bytes: size of the buffer, the same on every rank, for the log. This rank sends
  // `share` times as many bytes. written (count): the array that the collective writes on this rank.
  template <class T, class Issue>
  void run(const char* name, size_t bytes, double share, const T* written, size_t count, Issue issue) {
    if (size_ == 1) return;
    std::lock_guard lock(mutex_);
    if (pending_.size() >= most_pending_) collect_finished();
    const uint64_t sequence = calls_->enter(name, bytes, 1, group_);
    KernelRange range(name, stream_, {share * double(bytes), 0});
    Pending call = begin(stream_);
    call.sequence = sequence;
    if (const ncclResult_t result = issue(); result != ncclSuccess)
      check_nccl(result, (std::string(name) + " in the group " + group_).c_str());
    call.end->record(stream_);
    pending_.push_back(std::move(call));
    ++issued_;
    traffic_[count_].bytes_sent[name] += share * double(bytes);
    if constexpr (std::is_same_v<T, float> || sizeof(T) == 2) range.writes(written, count);
  }

 private:
  void wait_for(cudaStream_t stream, const Event& event) {
    // A collective counts where it is waited for first. The gathers at the end of a step are, in the next one; when their
    // own is read they may still be under way.
    const size_t unawaited = std::min<size_t>(issued_ - std::exchange(awaited_, issued_), pending_.size());
    for (size_t i = pending_.size() - unawaited; i < pending_.size(); ++i) pending_[i].count = count_;
    if (!is_timed_) {
      CUDA_CHECK(cudaStreamWaitEvent(stream, event));
      return;
    }
    Pending waiting = begin(stream);
    CUDA_CHECK(cudaStreamWaitEvent(stream, event));
    waiting.end->record(stream);  // to measure
    waits_.push_back(std::move(waiting));
  }

  Pending begin(cudaStream_t stream) {
    Pending pending = {count_, is_timed_ ? unused() : nullptr, unused()};
    if (is_timed_) pending.start->record(stream);  // to measure
    return pending;
  }

  // Takes an event that is not in use, or makes a new one.
  std::unique_ptr<Event> unused() {
    std::vector<std::unique_ptr<Event>>& free = free_[is_timed_];
    if (free.empty()) return std::make_unique<Event>(is_timed_ ? cudaEventDefault : cudaEventDisableTiming);
    std::unique_ptr<Event> one = std::move(free.back());
    free.pop_back();
    return one;
  }

  // Collectives end in the order in which they were issued, so few queries find the first one that is under way.
  void collect_finished() {
    const auto has_finished = [](const Pending& one) { return is_ready(*one.end); };
    const auto under_way = std::partition_point(pending_.begin(), pending_.end(), has_finished);
    for (auto one = pending_.begin(); one != under_way; ++one) {
      calls_->leave(one->sequence);
      retire(*one, &Traffic::milliseconds);
    }
    pending_.erase(pending_.begin(), under_way);
    most_pending_ = pending_.size() + 256;
    for (; !waits_.empty() && is_ready(*waits_.front().end); waits_.pop_front())
      retire(waits_.front(), &Traffic::exposed_milliseconds);
  }

  // sum: the time to which that of `done` is added
  void retire(Pending& done, double Traffic::*sum) {
    const bool was_timed = done.start != nullptr;
    if (was_timed) traffic_[done.count].*sum += elapsed_ms(*done.start, *done.end);
    if (was_timed) free_[true].push_back(std::move(done.start));
    free_[was_timed].push_back(std::move(done.end));
  }

  const char* group_ = "alone";
  NcclComm comm_;
  CallLog* calls_ = nullptr;
  int rank_ = 0, size_ = 1;
  cudaStream_t stream_ = nullptr;
  Event order_;
  uint64_t issued_ = 0, awaited_ = 0;  // the number of collectives so far; of these when a wait was issued last
  std::mutex mutex_;     // protects the members that refresh() uses on another thread
  std::deque<Pending> pending_, waits_;          // collectives, in the order of issue; timed waits for them
  std::vector<std::unique_ptr<Event>> free_[2];  // without times, and with times
  size_t most_pending_ = 256;                    // at this number run() looks which of them have finished
  int count_ = 0;
  bool is_timed_ = false;
  std::map<int, Traffic> traffic_;
};

// One direction between two ranks, on a stream of its own: one of them sends, the other receives.
class Lane : public Communicator {
 public:
  using Communicator::Communicator;
  // A silent lane sends nothing, and receives zeros from nobody.
  void silence(bool wanted) { is_silent_ = wanted; }
  template <class T>
  void send(const T* data, size_t count) {
    if (!is_silent_) Communicator::send(data, count, 1 - rank());
  }
  template <class T>
  void receive(T* data, size_t count) {
    if (!is_silent_) return Communicator::receive(data, count, 1 - rank());
    run("receive", 0, 0, data, count, [&] { return CUDA_CHECK(cudaMemsetAsync(data, 0, count * sizeof(T), stream())), ncclSuccess; });
  }

 private:
  bool is_silent_ = false;
};
