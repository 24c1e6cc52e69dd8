// An event with an owner, and functions that time work on the device with events.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "kernels/device/common.cuh"

// A CUDA event that is destroyed with this object. It is made when it is used first: a plan on a machine without a GPU
// has events, and uses none.
class Event : NotCopied {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) : flags_(flags) {}
  ~Event() {
    if (event_) cudaEventDestroy(event_);
  }
  operator cudaEvent_t() const {
    if (!event_) CUDA_CHECK(cudaEventCreateWithFlags(&event_, flags_));
    return event_;
  }
  void record(cudaStream_t stream) { CUDA_CHECK(cudaEventRecord(*this, stream)); }

 private:
  unsigned flags_;
  mutable cudaEvent_t event_ = nullptr;
};

inline float elapsed_ms(const Event& start, const Event& end) {
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, end));
  return milliseconds;
}

// Runs work() once, and returns the seconds that it takes on `stream`.
template <class Work>
double seconds_of(cudaStream_t stream, Work work) {
  Event start(cudaEventDefault), end(cudaEventDefault);
  start.record(stream);  // to measure
  work();
  end.record(stream);  // to measure
  CUDA_CHECK(cudaEventSynchronize(end));  // to measure
  return elapsed_ms(start, end) / 1e3;
}

// The seconds that work() takes on `stream`: the fastest of three runs, after one that is not counted.
template <class Work>
double best_seconds(cudaStream_t stream, Work work) {
  double best = INFINITY;
  for (int run = 0; run < 4; ++run) {
    const double seconds = seconds_of(stream, work);
    if (run > 0) best = std::min(best, seconds);
  }
  return best;
}

inline std::chrono::steady_clock::time_point last_comparison;  // when best_seconds_of_each() last ended

// The same for each of work(0) to work(count - 1), to compare them. They run in turns, on a device that has been busy
// for 0.2 s: an idle device has low clock rates, and work that is timed while these rise would look slow.
template <class Work>
std::vector<double> best_seconds_of_each(cudaStream_t stream, size_t count, Work work) {
  using Clock = std::chrono::steady_clock;
  using std::chrono::milliseconds;
  const Clock::time_point begin = Clock::now();
  const bool was_idle = begin - last_comparison > milliseconds(500);
  while (was_idle && Clock::now() - begin < milliseconds(200)) {
    for (size_t i = 0; i < count; ++i) work(i);
    CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  std::vector<double> best(count, INFINITY);
  for (int turn = 0; turn < 4; ++turn)
    for (size_t i = 0; i < count; ++i) {
      const double seconds = seconds_of(stream, [&] { work(i); });
      if (turn > 0) best[i] = std::min(best[i], seconds);
    }
  last_comparison = Clock::now();
  return best;
}
