// Work that is the same every time, as a CUDA graph: it is recorded once and then launched as a whole, so the host no
// longer spends some microseconds on each of its kernels (CUDA C++ Programming Guide, "CUDA Graphs"). Pointers and
// sizes are recorded, too; the data behind the pointers may change.
#pragma once

#include <map>

#include "kernels/device/common.cuh"

class RecordedWork {
 public:
  RecordedWork() = default;
  ~RecordedWork() { clear(); }
  RecordedWork(const RecordedWork&) = delete;
  RecordedWork& operator=(const RecordedWork&) = delete;

  // work() must launch kernels and copies on `stream`, and nothing else. The first call is not recorded: it may load
  // kernels, and make plans for matrix products.
  template <class Work>
  void run(cudaStream_t stream, Work work) {
    if (calls_++ == 0) return work();
    if (!executable_) record(stream, work);
    CUDA_CHECK(cudaGraphLaunch(executable_, stream));
  }

  // To be called when the work changes: drops the graph.
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

// Several pieces of work, each with a key that identifies it.
template <class Key>
class RecordedWorks {
 public:
  // Runs work(): as a graph, unless it is not the same every time (`changes`), or the profiler wants to see each
  // launch.
  template <class Work>
  void run(const Key& key, bool changes, cudaStream_t stream, Work work) {
    const Profiler& profiler = Profiler::instance();
    if (changes || profiler.enabled || profiler.trace || profiler.listener) return work();
    graphs_[key].run(stream, work);
  }

 private:
  std::map<Key, RecordedWork> graphs_;
};
