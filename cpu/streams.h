// State that the parts of the CPU device's runtime share: the current device, the last error, and streams
// (cuda_runtime.cpp: errors, devices, launches; memory.cpp: memory; streams.cpp: streams, events and graphs).
#pragma once

#include <chrono>
#include <climits>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "cpu/cuda_runtime.h"

namespace cpu {

using Clock = std::chrono::steady_clock;

// One recording of an event. A wait is for the recording that was the latest when the wait was issued.
struct Recording {
  size_t number;
  std::atomic<bool> done = false;  // other threads may ask
  Clock::time_point when;
};

struct StreamOperation {
  std::function<bool()> poll;            // starts or continues the operation; returns true when it has finished
  std::shared_ptr<Recording> waits_for;  // set instead of poll: the operation has finished when this is recorded
};

}  // namespace cpu

struct CUevent_st {
  int device;
  std::shared_ptr<cpu::Recording> latest;
};

struct CUgraph_st {
  std::vector<std::function<bool()>> operations;
  cpu::Counts inside;  // counts of these operations; during the recording, the counts before it
};

struct CUstream_st {
  int device = 0;
  bool blocking = true;  // it waits for the null stream, and the null stream for it
  int priority = 0;
  std::deque<cpu::StreamOperation> queue = {};
  int number = INT_MAX;  // from 1: streams that were created before, and this one; INT_MAX: a null stream
  CUgraph_st* recording = nullptr;
};

namespace cpu {

cudaError_t remember(cudaError_t error);  // as the last error of this thread, and returns it

// Every call that reaches the driver on a GPU begins with this. The driver reads the variables CUDA_* once, at the
// first such call: one that is changed later is reported, and ends the program. Returns an error if there is no driver.
cudaError_t call_driver();
int current_device();  // of this thread
bool is_here(cudaStream_t stream);  // does the stream belong to the current device? The null stream always does.

void drain_stream(cudaStream_t stream);
void drain_device();  // waits for all streams of the current device

// Is any of [p, p + bytes) outside its allocation, or in an allocation of another device?
bool is_out_of_bounds(const void* p, size_t bytes);

}  // namespace cpu
