// Where gradients add up over the micro-steps of a step, and which of them an update applies: here in one array, which the step's
// own update applies. A room may keep them elsewhere, or apply them later.
//
// ZeRO 0 and 1 have whole units, which backward writes; ZeRO 2 and 3 have this rank's pieces, to which sums over the ranks are added.
#pragma once

#include <functional>
#include <optional>

#include "gpt/shards.h"
#include "kernels/device/memory.cuh"

class GradientHome {
 public:
  // values: `count` gradients on the device, from number `first` on of those that this rank keeps of a unit
  using Work = std::function<void(const float* values, size_t first, size_t count)>;

  // zero: ZeRO's level
  GradientHome(const Shards& shards, const Kept& kept, int zero) : shards_(shards), kept_(kept), zero_(zero) {}
  virtual ~GradientHome() = default;

  virtual void lay_out(Arena& arena) { written_ = applied_ = arena.take<float>(count()); }
  virtual void add_to(PinnedMemory&) {}
  // There has been no pass since the last update.
  virtual void clear(cudaStream_t stream) { clear(written_, stream); }

  // ---- a step

  float* written() const { return written_; }
  virtual void begin_micro_step() {}
  // Is a sum over the ranks to be given to add(), which brings it to its place, or adds it to the values there?
  virtual bool has_add() const { return false; }
  virtual void add([[maybe_unused]] int unit, [[maybe_unused]] const float* sum, [[maybe_unused]] bool to_earlier, cudaStream_t) {}
  // Are gradients added up over the ranks behind the update of their step, while the next one is computed? (Then all are whole.)
  virtual bool is_behind() const { return false; }

  // ---- an update: the gradients that it applies

  // The first gradient that this rank keeps of a unit, in device or host memory; applied(): the first one of all units.
  float* of(int unit) const {
    return applied() + (zero_ == 1 ? shards_.whole_offset(unit) + kept_.begin(unit) : kept_.offset(unit));
  }
  virtual float* applied() const { return applied_; }
  // Are there any?
  virtual bool has_applied() const { return true; }
  // To be called before the stream waits for their sums over the ranks. Returns false if it has done so since the last update.
  virtual bool begin_completion() { return true; }
  // Calls work() once for a unit, or for each of its windows, as they come to the device.
  virtual void read(int unit, cudaStream_t, const Work& work) { work(of(unit), 0, kept_.count(unit)); }
  // The loss of their batch, in device memory. of_step: of the step that ends, whose gradients may be others
  virtual const float* loss(const float* of_step) const { return of_step; }
  virtual void keep_loss(const float*, cudaStream_t) {}
  // To be called behind the update. Returns whether the gradients of the step that ends are now those that the next update applies,
  // and are to be added up.
  virtual bool take_turns() { return false; }

  // ---- from and to a checkpoint

  // The loss of the batch whose gradients wait for the next update. It waits for the stream.
  virtual std::optional<float> waiting(cudaStream_t) const { return {}; }
  virtual bool has_waiting() const { return false; }
  // Gradients with this loss have been copied in; or there are none.
  virtual void set_waiting(std::optional<float>, cudaStream_t stream) { clear(applied_, stream); }

 protected:
  size_t count() const { return zero_ >= 2 ? shards_.all_pieces() : shards_.all_whole(); }
  void clear(float* array, cudaStream_t stream) const {
    if (array) CUDA_CHECK(cudaMemsetAsync(array, 0, count() * sizeof(float), stream));
  }

  const Shards& shards_;
  const Kept& kept_;
  int zero_;
  // Of all units: where the step adds up, and what the update applies. Here they are one array; a room that applies the gradients
  // of the step before has two, which change places.
  float *written_ = nullptr, *applied_ = nullptr;
};
