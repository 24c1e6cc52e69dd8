// The inputs of blocks in the host's memory (--offload activations, with --recompute block, which keeps no other
// activations): each is sent to the host after the forward of its block, and brought back during the backward of the
// block after it. The device has two of them; the blocks of a chunk take turns (offload.cuh).
#pragma once

#include <utility>

#include "extensions/offload/offload.cuh"
#include "gpt/block_inputs.cuh"

template <class Float>
class OffloadedInputs final : public BlockInputs<Float> {
 public:
  explicit OffloadedInputs(cudaStream_t stream) : stream_(stream) {}

  bool takes_turns() const override { return true; }
  void lay_out(Arena& arena, Float* first, size_t count) override {
    bytes_ = count * sizeof(Float);
    on_device_[0] = first;
    on_device_[1] = arena.take<Float>(count);
  }
  // There is room for inputs of `count` elements of `blocks` blocks in each of `slots` slots.
  void lay_out_on_host(Arena& arena, size_t count, int slots, int blocks) {
    blocks_ = size_t(blocks);
    on_host_ = arena.take<Float>(size_t(slots) * blocks_ * count);
  }

  void begin_forward(Float*& input, int number) override {
    traffic_.wait_until_free(buffer_of(number), stream_);
    input = on_device_[buffer_of(number)];
  }
  void end_forward(Float* input, int slot, int number, bool is_needed) override {
    const size_t buffer = buffer_of(number);
    on_device_[buffer] = input;
    holds_[buffer] = {slot, number};
    traffic_.end_use(buffer, stream_);
    if (is_needed) traffic_.send_back(buffer, array_of(slot, number));
  }

  void bring(int slot, int number) override {
    if (number < 0 || holds_[buffer_of(number)] == std::pair(slot, number)) return;
    holds_[buffer_of(number)] = {slot, number};
    traffic_.bring(buffer_of(number), array_of(slot, number));
  }
  void begin_backward(Float*& input, int slot, int number) override {
    bring(slot, number);
    bring(slot, number - 1);  // one block ahead
    traffic_.wait_until_here(buffer_of(number), stream_);
    input = on_device_[buffer_of(number)];
  }
  void end_backward(int number) override { traffic_.end_use(buffer_of(number), stream_); }

 private:
  static size_t buffer_of(int number) { return size_t(number) % HostTraffic::buffers; }

  std::vector<OffloadedArray> array_of(int slot, int number) const {
    const size_t before = (size_t(slot) * blocks_ + size_t(number)) * bytes_;
    return std::vector(1, OffloadedArray{on_device_[buffer_of(number)], reinterpret_cast<char*>(on_host_) + before, bytes_});
  }

  cudaStream_t stream_;
  size_t bytes_ = 0, blocks_ = 0;
  Float *on_device_[HostTraffic::buffers] = {}, *on_host_ = nullptr;
  std::pair<int, int> holds_[HostTraffic::buffers] = {{-1, 0}, {-1, 0}};  // slot and number of the block whose input is there
  HostTraffic traffic_{"activations"};
};
