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
      for (Place& place : places_) place.device = arena.take<int>(ints(most_tokens));
    });
    memory_.allocate();
    for (int i : {0, 1}) places_[i].host = static_cast<int*>(pinned_.data()) + size_t(i) * ints(most_tokens);
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
  // such a batch does not train. The batch stays in device memory until two more batches have been sent.
  Batch send(const int* inputs, const int* targets, int batch_size, int seq_len) {
    const size_t rows = size_t(batch_size) * size_t(seq_len);
    places_[current_].used.record(stream_);
    current_ ^= 1;
    Place& place = places_[current_];
    CUDA_CHECK(cudaEventSynchronize(place.copied));  // the batch before last has left this pinned buffer
    std::copy_n(inputs, rows, place.host);
    std::copy_n(targets ? targets : inputs, rows, place.host + rows);
    sort_by_token(inputs, int(rows), place.host + 2 * rows);
    CUDA_CHECK(cudaStreamWaitEvent(copies_, place.used));
    CUDA_CHECK(cudaMemcpyAsync(place.device, place.host, 3 * rows * sizeof(int), cudaMemcpyHostToDevice, copies_));
    place.copied.record(copies_);
    CUDA_CHECK(cudaStreamWaitEvent(stream_, place.copied));
    return {.inputs = place.device, .targets = place.device + rows, .order = place.device + 2 * rows,
            .batch_size = batch_size, .seq_len = seq_len, .training = targets != nullptr};
  }

 private:
  static size_t ints(int tokens) { return 3 * size_t(tokens); }  // inputs, targets, order

  struct Place {
    int *host, *device;
    Event copied, used;
  };

  cudaStream_t stream_, copies_ = nullptr;
  HostMemory pinned_;
  DeviceMemory memory_;
  Place places_[2];
  int current_ = 0;
};
