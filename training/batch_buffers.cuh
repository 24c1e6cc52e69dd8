// Sends micro-batches to the device. There are two buffers in pinned memory and two on the device, used in turn, and
// the copies run on a stream of their own. So a batch is read and sent while the one before it is computed.
#pragma once

#include <algorithm>

#include "kernels/embedding.cuh"
#include "kernels/device/event.cuh"
#include "model.cuh"

class BatchBuffers {
 public:
  // For batches of at most `most_tokens` tokens, computed on `stream`.
  BatchBuffers(int most_tokens, cudaStream_t stream)
      : stream_(stream), pinned_(2 * ints(most_tokens) * sizeof(int)) {
    memory_.add("batches", [&](Arena& arena) {
      for (Buffer& buffer : buffers_) buffer.device = arena.take<int>(ints(most_tokens));
    });
    memory_.allocate();
    for (int i : {0, 1}) buffers_[i].host = static_cast<int*>(pinned_.data()) + size_t(i) * ints(most_tokens);
    CUDA_CHECK(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking));
    Profiler::instance().name_stream(copies_, "copies");
  }
  ~BatchBuffers() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(copies_);
  }
  BatchBuffers(const BatchBuffers&) = delete;
  BatchBuffers& operator=(const BatchBuffers&) = delete;

  const DeviceMemory& memory() const { return memory_; }

  // inputs, targets: (batch_size, seq_len) token ids in host memory, copied before this returns; targets may be null:
  // such a batch does not train. It is filled up with tokens 0 to so many rows, if they are more than batch_size·seq_len.
  // The batch stays in device memory until two more batches have been sent.
  Batch send(const int* inputs, const int* targets, int batch_size, int seq_len, int at_least_rows = 0) {
    const size_t tokens = size_t(batch_size) * size_t(seq_len), rows = std::max(tokens, size_t(at_least_rows));
    buffers_[current_].used.record(stream_);
    current_ ^= 1;
    Buffer& buffer = buffers_[current_];
    CUDA_CHECK(cudaEventSynchronize(buffer.copied));  // the batch before last has left this pinned buffer
    std::fill_n(buffer.host, 2 * rows, 0);
    std::copy_n(inputs, tokens, buffer.host);
    std::copy_n(targets ? targets : inputs, tokens, buffer.host + rows);
    sort_by_token(buffer.host, int(rows), buffer.host + 2 * rows);
    CUDA_CHECK(cudaStreamWaitEvent(copies_, buffer.used));
    CUDA_CHECK(cudaMemcpyAsync(buffer.device, buffer.host, 3 * rows * sizeof(int), cudaMemcpyHostToDevice, copies_));
    buffer.copied.record(copies_);
    CUDA_CHECK(cudaStreamWaitEvent(stream_, buffer.copied));
    return {.inputs = buffer.device, .targets = buffer.device + rows, .order = buffer.device + 2 * rows,
            .batch_size = batch_size, .seq_len = seq_len, .training = targets != nullptr};
  }

 private:
  static size_t ints(int tokens) { return 3 * size_t(tokens); }  // inputs, targets, order

  struct Buffer {
    int *host, *device;
    Event copied;  // the copy from host to device is done
    Event used;    // the kernels that read the batch are done
  };

  cudaStream_t stream_, copies_ = nullptr;
  HostMemory pinned_;
  DeviceMemory memory_;
  Buffer buffers_[2];
  int current_ = 0;
};
