// Attributes of the device; its multiprocessors (SMs), and the margin of them that kernels leave to collectives.
//
// A CUDA block of an NCCL collective takes an SM for itself. Products on Hopper, and our attention there, are
// persistent: they have a block for each SM, and a block keeps its SM until the kernel ends. So a collective that comes
// during such a kernel waits until it has ended. And a kernel that comes during a collective finds too few SMs: its
// last blocks start when the first ones have ended, and it takes up to twice as long. Where collectives may be under
// way, persistent kernels therefore have fewer blocks, by as many as the collectives may have.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/device/check.cuh"
#include "kernels/device/not_copied.h"

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Can this device multiply matrices in eight bits (extensions/fp8/kernels/fp8.cuh)?
inline bool has_fp8() {
  return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) + device_attribute(cudaDevAttrComputeCapabilityMinor) >= 89;
}

// Can it also multiply with a scale for each tile (extensions/fp8/kernels/fp8_tiles.cuh)?
inline bool has_fp8_tiles() { return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9; }

// While it lives, persistent kernels leave `count` SMs free.
class SmMargin : NotCopied {
 public:
  explicit SmMargin(int count) : outer_(std::exchange(current_, count)) {}
  ~SmMargin() { current_ = outer_; }

  static int current() { return current_; }

 private:
  inline static int current_ = 0;
  const int outer_;
};

// The blocks of a persistent kernel: half of the SMs at least.
inline int persistent_blocks() {
  const int all = device_attribute(cudaDevAttrMultiProcessorCount);
  return std::max(all - SmMargin::current(), (all + 1) / 2);
}
