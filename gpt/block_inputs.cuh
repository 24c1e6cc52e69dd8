// Where the inputs of blocks lie between forward and backward: here each with the other activations of its block and slot. A room may
// keep them elsewhere, and give blocks the same memory in turns.
#pragma once

#include "kernels/device/memory.cuh"

template <class Float>
class BlockInputs {
 public:
  virtual ~BlockInputs() = default;
  // Do blocks take turns? Then lay_out() takes memory beside that of the first input, for inputs of `count` elements.
  virtual bool takes_turns() const { return false; }
  virtual void lay_out(Arena&, Float*, size_t) {}

  // Forward of a chunk's block `number`: gives it memory for its input.
  virtual void begin_forward(Float*&, int) {}
  // input: the memory that holds the input now; the caller may have exchanged the given memory for it. is_needed: by
  // backward
  virtual void end_forward([[maybe_unused]] Float* input, [[maybe_unused]] int slot, int, [[maybe_unused]] bool is_needed) {}

  // Backward: starts to bring the input of a block, unless it is still there; and gives it to the block.
  virtual void bring([[maybe_unused]] int slot, int) {}
  virtual void begin_backward(Float*&, [[maybe_unused]] int slot, int) {}
  virtual void end_backward(int) {}
};
