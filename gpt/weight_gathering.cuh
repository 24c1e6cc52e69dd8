// How the pieces of a unit's weights become the whole unit on every rank (zero.cuh decides when): gathered as they are. A room may
// send something else in their place, codes for example, or compute something from whole units when they change.
#pragma once

#include "gpt/collectives.cuh"
#include "gpt/parameters.h"
#include "kernels/device/memory.cuh"

template <class Float>
class WeightGathering {
 public:
  // ranks: the data-parallel ones
  WeightGathering(const Shards& shards, Communicator& ranks) : shards_(shards), ranks_(ranks) {}
  virtual ~WeightGathering() = default;

  // Are the gathered weights rounded? Then the exact ones, which AdamW updates, are kept beside them, in fp32, too.
  virtual bool rounds() const { return false; }
  // The size of the unit in its buffer, in elements of the storage type.
  virtual size_t elements(int unit) const { return shards_.whole(unit); }
  // Memory for all units; and for messages, which lies with the unit buffers.
  virtual void add_to(DeviceMemory&) {}
  virtual void lay_out_messages(Arena&) {}

  // whole: a unit's weights, from `piece`, which may lie in it, at this rank's place; exact: the piece in fp32. On the ranks'
  // stream.
  virtual void gather(int unit, Float* whole, const Float* piece, [[maybe_unused]] const float* exact) {
    ranks_.all_gather(whole, piece, shards_.piece(unit));
  }
  // The unit is whole, and `stream` comes to use it. Returns the address by which its tensors are found, but for those that are
  // not there in the storage type.
  virtual const Float* use([[maybe_unused]] int unit, Float* whole, cudaStream_t) { return whole; }
  // The weights have changed.
  virtual void forget() {}
  // Has use() nothing to compute for any unit?
  virtual bool is_up_to_date() const { return true; }
  // Visits the values that have been computed from a tensor. Whole units are in use.
  virtual void visit_values(const TensorDescriptor&, const Parameters::Visit&) const {}

 protected:
  const Shards& shards_;
  Communicator& ranks_;
};
