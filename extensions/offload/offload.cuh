// Offload: arrays that are kept in the host's memory, and are on the device only while they are used (--offload; after
// ZeRO-Offload: Ren et al., arXiv:2101.06840, and ZeRO-Infinity: Rajbhandari et al., arXiv:2104.07857; here the device
// computes everything, and the host only keeps). The arrays take turns in two buffers of the device, and two streams
// copy, one in each direction, because PCIe carries both at the same time:
//
//   from host     | copy 0 to a | copy 1 to b |          | copy 2 to a | copy 3 to b |
//   compute                     |    use a    |   use b  |             |    use a    |   use b  |
//   to host                                   | a to 0   | b to 1      |             | a to 2   |
//
// Three events of each buffer order this. Without one of them:
//   arrived   the compute stream uses the old content of the buffer
//   used      results are copied to the host before they are computed, or overwritten while they are needed
//   left      the next array overwrites data that has not been copied to the host yet, or comes from memory that is still
//             to be written: copies to the host are made in the order of their issue, so the event of the last one is
//             enough for all before it
// The computation is the same as without offload, so all results have the same bits.
// Its events are tested by test_offload.
#pragma once

#include <string>
#include <vector>

#include "kernels/device/event.cuh"
#include "kernels/device/memory.cuh"

// An array in the host's memory, and its place in a buffer on the device.
struct OffloadedArray {
  void *device, *host;
  size_t bytes;
};

class HostTraffic {
 public:
  static constexpr size_t buffers = 2;

  // what: a name of the data, for the names of the streams in traces
  explicit HostTraffic(const std::string& what) : what_(what) {}
  ~HostTraffic() {
    for (cudaStream_t stream : {from_host_, to_host_})
      if (stream) cudaStreamSynchronize(stream), cudaStreamDestroy(stream);
  }
  HostTraffic(const HostTraffic&) = delete;
  HostTraffic& operator=(const HostTraffic&) = delete;

  // Starts to copy arrays into a buffer, when all that has used it is done.
  void bring(size_t buffer, const std::vector<OffloadedArray>& arrays) {
    Buffer& to = buffers_[buffer];
    open(from_host_, " from host");
    CUDA_CHECK(cudaStreamWaitEvent(from_host_, to.used));
    CUDA_CHECK(cudaStreamWaitEvent(from_host_, buffers_[last_sent_].left));
    copy(arrays, true);
    to.arrived.record(from_host_);
  }
  // Later work of `stream` can use the arrays that were brought.
  void wait_until_here(size_t buffer, cudaStream_t stream) {
    CUDA_CHECK(cudaStreamWaitEvent(stream, buffers_[buffer].arrived));
  }
  // Later work of `stream` can overwrite the buffer.
  void wait_until_free(size_t buffer, cudaStream_t stream) {
    CUDA_CHECK(cudaStreamWaitEvent(stream, buffers_[buffer].left));
  }
  // To be called when all work that uses the buffer has been issued to `stream`.
  void end_use(size_t buffer, cudaStream_t stream) {
    buffers_[buffer].used.record(stream);
  }
  // Starts to copy a buffer's arrays to the host, when the work that uses it is done.
  void send_back(size_t buffer, const std::vector<OffloadedArray>& arrays) {
    Buffer& from = buffers_[buffer];
    open(to_host_, " to host");
    CUDA_CHECK(cudaStreamWaitEvent(to_host_, from.used));
    copy(arrays, false);
    from.left.record(to_host_);
    last_sent_ = buffer;
  }

  // Waits until the host's memory has all arrays that were sent to it, and nothing is read from there any more.
  void settle() const {
    for (cudaStream_t stream : {from_host_, to_host_})
      if (stream) CUDA_CHECK(cudaStreamSynchronize(stream));
  }

 private:
  struct Buffer {
    Event arrived, used, left;
  };

  // Makes a stream when it is used first: a plan uses none.
  void open(cudaStream_t& stream, const char* direction) const {
    if (stream) return;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Profiler::instance().name_stream(stream, (what_ + direction).c_str());
  }

  void copy(const std::vector<OffloadedArray>& arrays, bool to_device) {
    size_t bytes = 0;
    for (const OffloadedArray& array : arrays) bytes += array.bytes;
    const cudaStream_t stream = to_device ? from_host_ : to_host_;
    KernelRange range(to_device ? "offload_from_host" : "offload_to_host", stream, {double(bytes), 0});
    for (const auto& [device, host, size] : arrays)
      CUDA_CHECK(cudaMemcpyAsync(to_device ? device : host, to_device ? host : device, size, cudaMemcpyDefault, stream));
  }

  std::string what_;
  cudaStream_t from_host_ = nullptr, to_host_ = nullptr;
  Buffer buffers_[buffers];
  size_t last_sent_ = 0;  // the buffer that was sent to the host last
};
