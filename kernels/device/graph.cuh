// Work that is the same every time, as a CUDA graph: it is recorded once and then launched as a whole, so the host no
// longer spends some microseconds on each of its kernels (CUDA C++ Programming Guide, "CUDA Graphs"). Pointers and
// sizes are recorded, too; the data behind the pointers may change.
#pragma once

#include <map>

#include "kernels/device/common.cuh"

// Several pieces of work, each with a key that identifies it.
template <class Key>
class RecordedWorks : NotCopied {
 public:
  ~RecordedWorks() {
    for (const auto& [key, graph] : graphs_)
      if (graph) cudaGraphExecDestroy(graph);
  }

  // Runs work(): as a graph, unless it is not the same every time (`changes`), or the profiler wants to see each
  // launch. Work that is the same must launch kernels and copies on `stream`, and nothing else. Its first call is not
  // recorded: it may load kernels, and make plans for matrix products.
  template <class Work>
  void run(const Key& key, bool changes, cudaStream_t stream, Work work) {
    const Profiler& profiler = Profiler::instance();
    if (changes || profiler.enabled || profiler.trace || profiler.listener) return work();
    const auto [found, is_first_call] = graphs_.try_emplace(key, nullptr);
    if (is_first_call) return work();
    if (!found->second) found->second = record(stream, work);
    CUDA_CHECK(cudaGraphLaunch(found->second, stream));
  }

 private:
  template <class Work>
  static cudaGraphExec_t record(cudaStream_t stream, Work work) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return executable;
  }

  std::map<Key, cudaGraphExec_t> graphs_;  // null: not recorded yet
};
