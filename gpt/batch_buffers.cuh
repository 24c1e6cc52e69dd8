// Sends micro-batches to the device. There are two buffers or more, each with a half in pinned memory and a half on the
// device, used in turn, and the copies run on a stream of their own. So a batch is read and sent while the previous one
// is computed.
// Its events are tested by test_zero, test_delay, test_meshes.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/embedding.cuh"
#include "kernels/device/event.cuh"
#include "gpt/model.cuh"

// How many buffers there are, for how many tokens each at most, and the memory that they take.
struct BatchMemory {
  int most_tokens, buffers = 2;

  size_t ints() const { return 3 * size_t(most_tokens); }  // of a buffer: inputs, targets, rows in the order of tokens
  size_t pinned_bytes() const { return size_t(buffers) * ints() * sizeof(int); }
  std::vector<int*> lay_out(Arena& arena) const {
    std::vector<int*> arrays;
    for (int i = 0; i < buffers; ++i) arrays.push_back(arena.take<int>(ints()));
    return arrays;
  }
};

class BatchBuffers {
 public:
  // For batches of at most `most_tokens` tokens, computed on `stream`.
  BatchBuffers(int most_tokens, cudaStream_t stream, int buffers = 2) : BatchBuffers(BatchMemory{most_tokens, buffers}, stream) {}
  BatchBuffers(const BatchMemory& sizes, cudaStream_t stream)
      : stream_(stream), pinned_(sizes.pinned_bytes()), buffers_(size_t(sizes.buffers)) {
    memory_.add("batches", [&](Arena& arena) {
      const std::vector<int*> arrays = sizes.lay_out(arena);
      for (size_t i = 0; i < arrays.size(); ++i) buffers_[i].device = arrays[i];
    });
    memory_.allocate(0);  // by now libraries may have taken some of the reserve that the model's memory has left to them
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].host = static_cast<int*>(pinned_.data()) + i * sizes.ints();
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
  // such a batch does not train. Sends only the tokens at `positions`, pads short samples with token 0, and pads the
  // batch to at_least_rows rows. The batch stays in device memory until the other buffers and this one have been sent
  // again.
  Batch send(const int* inputs, const int* targets, int batch_size, int seq_len, const Positions& positions,
             int at_least_rows = 0) {
    const size_t tokens = size_t(batch_size) * size_t(positions.length), rows = std::max(tokens, size_t(at_least_rows));
    turn_ ^= 1;
    issued_[turn_].record(stream_);
    current_ = (current_ + 1) % buffers_.size();
    Buffer& buffer = buffers_[current_];
    CUDA_CHECK(cudaEventSynchronize(buffer.copied));  // the last batch in this pinned buffer has left it
    std::fill_n(buffer.host, 2 * rows, 0);
    copy_positions(inputs, buffer.host, batch_size, seq_len, positions);
    copy_positions(targets ? targets : inputs, buffer.host + rows, batch_size, seq_len, positions);
    sort_by_token(buffer.host, int(rows), buffer.host + 2 * rows);
    // All work that reads this buffer was issued before the previous call of send(): wait for it.
    CUDA_CHECK(cudaStreamWaitEvent(copies_, issued_[turn_ ^ 1]));
    CUDA_CHECK(cudaMemcpyAsync(buffer.device, buffer.host, 3 * rows * sizeof(int), cudaMemcpyHostToDevice, copies_));
    buffer.copied.record(copies_);
    CUDA_CHECK(cudaStreamWaitEvent(stream_, buffer.copied));
    return {.tokens = {buffer.device, buffer.device + rows, buffer.device + 2 * rows},
            .batch_size = batch_size, .positions = positions, .training = targets != nullptr};
  }

 private:
  // Copies the tokens that samples have at these positions, both runs of each.
  static void copy_positions(const int* samples, int* to, int batch_size, int seq_len, const Positions& p) {
    for (int b = 0; b < batch_size; ++b, samples += seq_len)
      for (const auto& [first, count] : {std::pair(p.first, p.half), {p.second, p.length - p.half}}) {
        std::copy_n(samples + first, std::clamp(seq_len - first, 0, count), to);
        to += count;
      }
  }

  struct Buffer {
    int *host, *device;
    Event copied;  // the copy from host to device is done
  };

  cudaStream_t stream_, copies_ = nullptr;
  HostMemory pinned_;
  DeviceMemory memory_;
  std::vector<Buffer> buffers_;
  size_t current_ = 0;
  Event issued_[2];  // all work that had been issued at the last call of send(), and at the one before
  int turn_ = 0;
};
