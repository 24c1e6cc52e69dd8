// The parameters of a model as the program sees them, whatever their storage type: their state, from and to the host.
// parallel/zero.cuh has them in memory.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/update.h"
#include "parallel/shards.h"

struct StoreOptions {
  int stage = 0;
  bool training = true;              // false: weights alone
  bool stochastic_rounding = false;  // bf16 without masters
  LossScale loss_scale = {};         // for fp16
  bool reduce_narrow = false;        // gradients travel as T, not as float
  uint64_t seed = 1337;
};

// A gradient to be written, or added to.
struct Gradient {
  float* data;
  bool accumulate;
};

class Parameters {
 public:
  // values: device memory, an element for each of the tensor's, of `bytes` bytes
  using Visit = std::function<void(const TensorDescriptor&, const std::string& what, const void* values, size_t bytes)>;

  virtual ~Parameters() = default;

  virtual const Shards& shards() const = 0;
  // The parts of tensors whose state this rank keeps: all in stage 0, else its pieces.
  virtual std::vector<Slice> own_slices() const = 0;

  // All zero, padding included, no update applied, and the loss scale that the options give.
  virtual void clear() = 0;
  // Fresh weights drawn from the seed (training stores only; gradients serve as scratch and are zero again after it).
  virtual void initialize() = 0;
  // Updates that were applied so far, and the loss scale for the next step.
  virtual void set_progress(size_t updates, const LossScale& scale) = 0;
  // On the stream: `to` is filled when that has been waited for.
  virtual void copy_out(const Slice& slice, State state, float* to) const = 0;
  virtual void copy_in(const Slice& slice, State state, const std::vector<float>& from) = 0;

  // Everything that all ranks must hold alike. Collective.
  virtual void visit_replicated(const Visit& visit) = 0;
  // ---- a step

  // To be called before the micro-step's forward pass. Gradients of the first are written, of later ones added; after
  // the last they are reduced over the ranks.
  virtual void begin_micro_step(bool first, bool last) = 0;
  // Will the pass that follows neither send anything nor wait for anything sent? Then its work is the same every time.
  virtual bool is_quiet() const = 0;
  // Where the gradients of a unit go that is to be computed next.
  virtual Gradient gradients(int unit) = 0;
  // Clips the gradients by their global norm and applies AdamW, unless *loss (device memory, the same on all ranks, on
  // its way on the stream of collectives) or the norm is not finite or beyond `limits`.
  virtual void update(const AdamW& options, float clip, const float* loss, const StepLimits& limits) = 0;
  // What the last step's gradients came to, and the loss scale for the next. Device memory.
  virtual GradientSummary* summary() = 0;
};
