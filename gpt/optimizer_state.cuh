// Masters and moments of the weights that a rank keeps (zero.cuh), and how the update reads and writes them: here they lie on
// the device, as the weights do. A room may keep them elsewhere, and bring them in windows (Kept, shards.h).
//
// Moments are float, or bf16 (--moments bf16; kernels/adamw.cuh).
#pragma once

#include <algorithm>
#include <vector>

#include "gpt/parameters.h"
#include "kernels/adamw.cuh"
#include "kernels/device/memory.cuh"

// The arguments of a unit's update, beside masters and moments.
template <class Float>
struct UnitUpdate {
  Float* weights;          // of all elements that this rank keeps of the unit
  const float* gradients;  // of `count` of these elements, which are updated, from number `first` on
  size_t first, count;
  const AdamW& options;
  const float* factor;         // in device memory, as the counters (kernels/adamw.cuh)
  const AdamWState* counters;
  uint64_t seed;  // of stochastic rounding
};

template <class Float>
class OptimizerState {
 public:
  OptimizerState(const Shards& shards, const Kept& kept, bool has_masters, const StoreOptions& options)
      : shards_(shards), kept_(kept), is_narrow_(options.narrow_moments) {
    if (has_masters) arrays_.push_back({State::weight, sizeof(float)});
    for (State moment : optimizer_states) arrays_.push_back({moment, is_narrow_ ? sizeof(__nv_bfloat16) : sizeof(float)});
  }
  virtual ~OptimizerState() = default;

  bool has_masters() const { return arrays_.front().state == State::weight; }

  virtual void lay_out(Arena& arena) {
    for (Array& array : arrays_) array.values = arena.take<char>(array.width * kept_.total());
  }
  virtual void add_to(PinnedMemory&) {}
  // Sets all to zero.
  virtual void clear(cudaStream_t stream) {
    for (const Array& array : arrays_) CUDA_CHECK(cudaMemsetAsync(array.values, 0, array.width * kept_.total(), stream));
  }

  // Calls work(values): values of a state from element number `kept` of all that is kept, in device or host memory.
  template <class Work>
  void with(State state, size_t kept, Work work) const {
    const Array& array = arrays_[number_of(state)];
    char* const values = array.values + kept * array.width;
    if (array.width == sizeof(float)) work(reinterpret_cast<float*>(values));
    else work(reinterpret_cast<__nv_bfloat16*>(values));
  }

  // Masters, from element number `kept` on, where with() gives them.
  float* masters(size_t kept) const { return reinterpret_cast<float*>(arrays_.front().values) + kept; }

  // Updates the elements that this rank keeps of a unit: all, or a window. An update of the model takes all units in order.
  virtual void update(int unit, const UnitUpdate<Float>& u, cudaStream_t stream) {
    const Window window = {unit, u.first, kept_.offset(unit) + u.first, u.count};
    std::vector<char*> at;
    for (const Array& array : arrays_) at.push_back(array.values + window.kept * array.width);
    update_window(window, u, at, stream);
  }

  // Waits until the values that with() gives are those of the last update.
  virtual void settle() const {}
  // Other values have been set.
  virtual void forget() {}

 protected:
  struct Array {
    State state;
    size_t width;  // bytes of an element
    char* values = nullptr;
  };

  size_t number_of(State state) const { return size_t(std::ranges::find(arrays_, state, &Array::state) - arrays_.begin()); }

  // at: of each array, where the window's values are on the device
  void update_window(const Window& window, const UnitUpdate<Float>& u, const std::vector<char*>& at, cudaStream_t stream) const {
    const size_t begin = kept_.begin(window.unit) + window.begin;  // in the unit
    Float* const weights = u.weights + window.begin;
    const float* const gradients = u.gradients + (window.begin - u.first);
    float* masters = has_masters() ? values_of<float>(State::weight, at) : nullptr;
    if constexpr (std::is_same_v<Float, float>) masters = masters ? masters : weights;
    if (masters && !is_narrow_) {
      // How many of these elements lie before the unit's `decayed`
      const size_t decayed = std::max(shards_.list().units()[size_t(window.unit)].decayed, begin) - begin;
      return adamw(weights, masters, values_of<float>(State::first_moment, at), values_of<float>(State::second_moment, at), gradients,
                   u.factor, u.counters, window.count, std::min(window.count, decayed), u.options, stream);
    }
    for (const Slice& slice : shards_.slices(window.unit, begin, window.count)) {  // random bits belong to elements of a tensor
      const TensorDescriptor& tensor = *slice.tensor;
      const size_t own = slice.in_unit - begin;
      const RandomBits random = {random_key(u.seed, "rounding " + tensor.name),
                                 random_key(u.seed, "rounding of moments " + tensor.name), slice.first, tensor.part};
      const auto round = [&](auto* first, auto* second) {  // the rounded-up count reaches into padding, which is zero
        adamw_stochastic(weights + own, masters ? masters + own : nullptr, first + own, second + own, gradients + own,
                         u.factor, u.counters, round_up(slice.count, shards_.list().alignment()), tensor.decays(), u.options, random, stream);
      };
      if (is_narrow_) round(values_of<__nv_bfloat16>(State::first_moment, at), values_of<__nv_bfloat16>(State::second_moment, at));
      else round(values_of<float>(State::first_moment, at), values_of<float>(State::second_moment, at));
    }
  }
  template <class T>
  T* values_of(State state, const std::vector<char*>& at) const {
    return reinterpret_cast<T*>(at[number_of(state)]);
  }

  const Shards& shards_;
  const Kept& kept_;
  bool is_narrow_;
  std::vector<Array> arrays_;
};
