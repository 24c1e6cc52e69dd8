// How a unit's gradients are added up over the data-parallel ranks (zero.cuh decides when):
//
//                           ZeRO 0        ZeRO 1 to 3
//   as they are             all_reduce    reduce_scatter
//   --reduce-dtype bf16     the same, of gradients cast to bf16
//
// A room may send something else in their place, and keep states for it. SumsBeside adds the parts that other ranks have.
#pragma once

#include <functional>
#include <span>

#include "gpt/collectives.cuh"
#include "gpt/parameters.h"
#include "kernels/cast.cuh"
#include "kernels/device/memory.cuh"

template <class Float>
class GradientReduction {
 public:
  // zero: ZeRO's level; ranks: the data-parallel ones
  GradientReduction(const Shards& shards, int zero, Communicator& ranks, const StoreOptions& options)
      : shards_(shards), zero_(zero), ranks_(ranks),
        casts_(options.training && options.cast_gradients && !std::is_same_v<Float, float> && ranks.size() > 1) {}
  virtual ~GradientReduction() = default;

  // Memory for states; and for messages, which lies with the unit buffers.
  virtual void add_to(DeviceMemory&) {}
  virtual bool has_messages() const { return casts_; }
  virtual void lay_out_messages(Arena& arena) {
    if (casts_) cast_ = arena.take<Float>(shards_.largest());
  }

  // The states: errors of the gradients that this rank sends, and factors (Parameters).
  virtual bool has_errors() const { return false; }
  virtual std::span<const TensorDescriptor> factors() const { return {}; }
  // Where a slice's values are; null: this keeps no such state.
  virtual float* kept(State, const Slice&) const { return nullptr; }
  // As they are before the first step.
  virtual void clear(cudaStream_t) {}

  // Adds up `whole`, this rank's gradients of a unit, over the ranks, on their stream. With ZeRO 0 the sum takes its
  // place. Otherwise it goes to `sum`, this rank's piece (with ZeRO 1 a part of `whole`), or is added to it.
  virtual void reduce(int unit, float* whole, float* sum, bool add, const GradientSummary*) {
    const size_t piece = shards_.piece(unit), begin = shards_.begin(unit), count = shards_.whole(unit);
    if (casts_) {
      cast(cast_, whole, count, ranks_.stream());
      if (zero_ == 0) ranks_.all_reduce(cast_, count);
      else ranks_.reduce_scatter(cast_ + begin, cast_, piece);
      return accumulate(sum, cast_ + (zero_ ? begin : 0), zero_ ? piece : count, add, ranks_.stream());
    }
    if (zero_ == 0) return ranks_.all_reduce(whole, count);
    float* const own = add ? whole + begin : sum;
    ranks_.reduce_scatter(own, whole, piece);
    if (add) accumulate(sum, own, piece, true, ranks_.stream());
  }
  // To be called behind the update, when *summary says whether it has been applied.
  virtual void end_step(const GradientSummary*, cudaStream_t) {}

 protected:
  const Shards& shards_;
  int zero_;
  Communicator& ranks_;

 private:
  bool casts_;
  Float* cast_ = nullptr;  // a unit, in the storage type
};

// Gradients of which ranks beside the data-parallel ones have a part each.
class SumsBeside {
 public:
  using Gradients = std::function<float*(int unit)>;  // the first of those that this rank keeps

  virtual ~SumsBeside() = default;
  // The sums over the data-parallel ranks have been issued to their stream, for all units; `stream` computes.
  virtual void begin(const Gradients&, cudaStream_t) {}
  // `stream` has waited for those; it waits for these, too.
  virtual void complete(const Gradients&, cudaStream_t) {}
};
