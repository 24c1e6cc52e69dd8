// The interface to the parameters of a model, the same for every storage type: a step's calls, and copies of their
// state to and from the host. gpt/zero.cuh implements it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gpt/blocks.h"
#include "gpt/options_of_rooms.h"
#include "kernels/update.h"

// The arrays that live in the host's memory and come to the device when they are used (extensions/offload/offload.cuh).
struct OffloadOptions {
  bool optimizer = false;    // masters and moments
  bool activations = false;  // inputs of blocks; all other activations are recomputed
  bool gradients = false;    // their sums over micro-steps
};

struct StoreOptions {
  int zero = 0;                      // ZeRO 0 to 3
  bool training = true;              // false: weights only, without gradients and optimizer state
  bool stochastic_rounding = false;  // bf16 without fp32 master weights
  bool narrow_moments = false;       // the optimizer's states are bf16, rounded stochastically
  OffloadOptions offload = {};
  LossScale loss_scale = {};         // the first one, for fp16
  bool cast_gradients = false;       // cast gradients to the 16-bit storage type before they are sent to other ranks
  uint64_t seed = 1337;
  bool random_biases = false;        // biases are drawn as matrices are, instead of zero, which hides mistakes
  bool frozen = false;               // of weights that are not trained beside others that are (lora.h)
  RoomOptions rooms = {};            // what rooms' parts read
};

// Where to write a gradient. accumulate: add to the values there.
struct Gradient {
  float* data;
  bool accumulate;
};

// Values of a tensor where they lie on this rank, in device or host memory.
struct TensorValues {
  const TensorDescriptor& tensor;
  State state;
  std::string what;     // "weights", "masters", ...
  const void* of_unit;  // the first of this rank's piece of the tensor's unit, or of the whole unit, if this rank has the tensor
  size_t bytes;         // of an element
  bool is_piece;
};

struct StepSums;  // gpt/step_sums.cuh

class Parameters {
 public:
  using Visit = std::function<void(const TensorValues&)>;

  virtual ~Parameters() = default;

  virtual const Shards& shards() const = 0;
  // The slices of tensors whose state this rank keeps: all tensors with ZeRO 0, else those in its pieces.
  virtual std::vector<Slice> kept_slices() const = 0;
  // Does this rank keep errors, of the parts of all its tensors (error_slices)?
  virtual bool has_errors() const { return false; }
  // The factors that gradients travel as, each a tensor that ranks hold whole; none without --compress powersgd.
  virtual std::span<const TensorDescriptor> factors() const { return {}; }

  // Sets everything to zero, padding and the number of updates included, and the loss scale to its option.
  virtual void clear() = 0;
  // Draws initial weights from the seed. For training only: the gradients serve as workspace, and are zero afterwards.
  virtual void initialize() = 0;
  // Sets the gradients to zero, and forgets which units have been gathered: as if there had been no pass since the last
  // update. To be called when the device is idle.
  virtual void forget_passes() = 0;
  // Sets the number of updates applied so far, and the loss scale for the next step. waiting: gradients have been copied
  // in that wait for the next update, with --delay, and this is the loss of their batch; else none wait.
  virtual void set_progress(size_t updates, const LossScale& scale, std::optional<float> waiting = {}) = 0;
  // Copies a slice to host memory, on the stream: `to` is filled when the caller has waited for the stream.
  virtual void copy_out(const Slice& slice, State state, float* to) const = 0;
  // The same for a block. If the block is gathered, the call is collective: each tensor-parallel rank makes it for its
  // block of the same round (blocks.h).
  virtual void copy_out(const CheckpointBlock& block, State state, float* to) = 0;
  // Waits until all copies to host memory are done.
  virtual void wait_for_copies() const = 0;
  // Sets the elements of a block that this rank keeps. from: the values of the whole block.
  virtual void copy_in(const CheckpointBlock& block, State state, const std::vector<float>& from) = 0;

  // Visits weights, values that are computed from them, masters and moments of all tensors, in the same order on all ranks.
  // Collective.
  virtual void visit_values(const Visit& visit) = 0;

  // ---- a step

  // Where to write the gradients of a unit, which the caller computes next.
  virtual Gradient gradients(int unit) = 0;
  // Clips the gradients by their global norm and applies AdamW. If the norm or the loss of their batch is not finite or
  // beyond `limits`, nothing is changed. sums: in device memory, this rank's terms of the step's sums over all
  // ranks, the loss among them; on return the sums.
  virtual void update(const AdamW& options, float clip, StepSums* sums, const StepLimits& limits) = 0;
  // Do gradients of the last step wait for the next update (--delay)?
  virtual bool waits() const = 0;
  // Completes the sums of the gradients that wait for the next update, so that they can be copied, and returns the loss
  // of their batch; none: none wait. Collective.
  virtual std::optional<float> settle_waiting() = 0;
  // Brings the weights of all islands together (islands.cuh). To be called after an update, if there are outer steps.
  // is_under_way: start_outer_step() has begun it, for weights that updates have changed since then.
  virtual void outer_step(bool is_under_way) = 0;
  virtual void start_outer_step() = 0;
  // Norm and clip factor of the last update's gradients, and the loss scale for the next step, in device memory.
  virtual GradientSummary* summary() = 0;
};
