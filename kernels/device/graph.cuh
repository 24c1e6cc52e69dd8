// Work that is the same every time, as a CUDA graph: recorded once, it is launched as a whole, and the host no longer
// pays some microseconds for each kernel of it (CUDA C++ Programming Guide, "CUDA Graphs"). Pointers and sizes are
// recorded, too; what lies there may change.
#pragma once

#include "kernels/device/common.cuh"

class RecordedWork {
 public:
  RecordedWork() = default;
  ~RecordedWork() { clear(); }
  RecordedWork(const RecordedWork&) = delete;
  RecordedWork& operator=(const RecordedWork&) = delete;

  // work(): launches on `stream`, and nothing else. The first time it is not recorded, as products choose their
  // algorithms.
  template <class Work>
  void run(cudaStream_t stream, Work work) {
    if (calls_++ == 0) return work();
    if (!executable_) record(stream, work);
    CUDA_CHECK(cudaGraphLaunch(executable_, stream));
  }

  // The work will be another from now on.
  void clear() {
    if (executable_) cudaGraphExecDestroy(executable_);
    executable_ = nullptr;
    calls_ = 0;
  }

 private:
  template <class Work>
  void record(cudaStream_t stream, Work work) {
    cudaGraph_t graph = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
  }

  cudaGraphExec_t executable_ = nullptr;
  size_t calls_ = 0;
};
