// Blocks of a checkpoint that ranks put together from the runs that each of them has (blocks.h): here there are none.
#pragma once

#include "gpt/blocks.h"
#include "kernels/device/common.cuh"
#include "kernels/device/memory.cuh"

class CheckpointBlockGathering {
 public:
  virtual ~CheckpointBlockGathering() = default;
  virtual void add_to(DeviceMemory&) {}
  // Collective: one round, a block of block.count elements for each rank. own: as many values that this rank has of the round, as
  // they are stored, in device or host memory; to: this rank's block. Waits for the device.
  virtual void gather(const CheckpointBlock&, const float*, float*, cudaStream_t) {}
  virtual void gather(const CheckpointBlock&, const __nv_bfloat16*, float*, cudaStream_t) {}
  virtual void gather(const CheckpointBlock&, const __half*, float*, cudaStream_t) {}
};
