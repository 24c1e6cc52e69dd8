// The arrays of gradients, from the backward that computes them to the update that applies them.
//
// Without --delay there is one array. With --delay 1 there are two, which take turns after each step: while backward
// writes one of them, the other is summed over the ranks, during a whole step. The end of the step applies it:
//
//   w(s+1) = w(s) − AdamW(g(s−1))
//
// So the first step applies nothing. An update without a step before it applies the waiting gradients, and leaves none.
#pragma once

#include <utility>

#include "kernels/device/memory.cuh"

struct GradientArrays {
  float *written = nullptr, *applied = nullptr;  // the array that backward writes, the one that the update applies
  float* loss = nullptr;     // loss of the batch whose gradients wait
  bool is_fresh = false;     // has a step written gradients since the last update?
  bool waits = false;        // are the gradients to be applied those of the step before?
  bool is_complete = false;  // have their sums over ranks arrived?

  void lay_out(Arena& arena, size_t count, bool delays) {
    written = applied = arena.take<float>(count);
    if (delays) written = arena.take<float>(count), loss = arena.take<float>(1);
  }

  // Waits for the stream.
  float read_loss(cudaStream_t stream) const {
    float value = 0;
    copy_and_wait(&value, loss, 1, cudaMemcpyDeviceToHost, stream);
    return value;
  }

  // After an update. Returns whether gradients wait for the next one.
  bool take_turns() {
    waits = std::exchange(is_fresh, false);
    is_complete = false;
    if (waits) std::swap(written, applied);
    return waits;
  }
};
