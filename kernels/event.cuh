// Events that belong to somebody, and what they time.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/common.cuh"

// An event that exists as long as its owner.
class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) { CUDA_CHECK(cudaEventCreateWithFlags(&event_, flags)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }
  void record(cudaStream_t stream) { CUDA_CHECK(cudaEventRecord(event_, stream)); }

 private:
  cudaEvent_t event_;
};

inline float elapsed_ms(const Event& start, const Event& end) {
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, end));
  return milliseconds;
}

// Of work() on `stream`: the shortest of three runs, after one that is not counted.
template <class Work>
double best_seconds(cudaStream_t stream, Work work) {
  double best = INFINITY;
  Event start(cudaEventDefault), end(cudaEventDefault);
  for (int i = 0; i < 4; ++i) {
    start.record(stream);
    work();
    end.record(stream);
    CUDA_CHECK(cudaEventSynchronize(end));
    if (i > 0) best = std::min(best, elapsed_ms(start, end) / 1e3);
  }
  return best;
}
