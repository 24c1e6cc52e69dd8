// Masters and moments of what a rank keeps (zero.cuh): where they lie, and how they come to the update.
//
// They lie on the device, as long as the weights do; or, with --offload optimizer, in pinned memory of the host. Then
// the update takes them in *windows*, neighbouring elements of one unit, as many as this rank keeps of a block; a
// larger unit, the embedding, has several. While one window is updated, the next one comes and the one before goes
// back (offload.cuh). The first two come behind forward and backward, and the last two leave behind the next forward.
//
// Moments are float, or bf16 (--moments bf16; kernels/adamw.cuh).
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/adamw.cuh"
#include "parallel/offload.cuh"
#include "parallel/parameters.h"

class OptimizerState {
 public:
  // kept: how many elements this rank keeps of each unit; the first unit is the embedding, the last the final norm.
  OptimizerState(const std::vector<size_t>& kept, bool has_masters, const StoreOptions& options)
      : has_masters_(has_masters), is_narrow_(options.narrow_moments), is_offloaded_(options.offload.optimizer),
        traffic_("optimizer") {
    largest_ = is_offloaded_ ? *std::max_element(kept.begin() + 1, kept.end()) : SIZE_MAX;
    for (const size_t count : kept) {
      std::vector<Window>& of_unit = windows_.emplace_back();
      for (size_t begin = 0; begin < count; begin += of_unit.back().count) {
        of_unit.push_back({all_.size(), begin, total_ + begin, std::min(largest_, count - begin)});
        all_.push_back(of_unit.back());
      }
      total_ += count;
    }
  }

  bool has_masters() const { return has_masters_; }
  bool is_offloaded() const { return is_offloaded_; }

  // All of it, or the two buffers; and what the host has.
  void lay_out(Arena& arena) {
    for (size_t i = 0; i < (is_offloaded_ ? HostTraffic::buffers : 1); ++i)
      take(arena, on_device_[i], is_offloaded_ ? largest_ : total_);
  }
  void lay_out_on_host(Arena& arena) { take(arena, on_host_, total_); }

  // Sets all to zero. To be called when the device is idle.
  void clear(cudaStream_t stream) {
    forget();
    for_each_array(kept_arrays(), total_, [&](void* array, size_t bytes) {
      if (is_offloaded_) std::memset(array, 0, bytes);
      else CUDA_CHECK(cudaMemsetAsync(array, 0, bytes, stream));
    });
  }

  // Calls work(values), values of a state from the element number `kept` of all that is kept, in device or host memory.
  template <class Work>
  void with(State state, size_t kept, Work work) const {
    const Arrays& arrays = kept_arrays();
    if (state == State::weight) return work(arrays.masters + kept);
    void* const moment = arrays.moments[std::find(optimizer_states, std::end(optimizer_states), state) - optimizer_states];
    if (is_narrow_) work(static_cast<__nv_bfloat16*>(moment) + kept);
    else work(static_cast<float*>(moment) + kept);
  }

  // What an update has beside weights, gradients and state. factor, counters: in device memory (kernels/adamw.cuh)
  struct Update {
    const AdamW& options;
    const float* factor;
    const AdamWState* counters;
    uint64_t seed;  // of stochastic rounding
  };

  // Updates what this rank keeps of a unit, from its element `begin` on. An update takes all units in order.
  template <class Float>
  void update(const Shards& shards, int unit, size_t begin, Float* weights, const float* gradients, const Update& u,
              cudaStream_t stream) {
    for (const Window& window : windows_[size_t(unit)]) {
      const Range range = {begin + window.unit_begin, window.count};
      Float* const w = weights + window.unit_begin;
      const float* const g = gradients + window.unit_begin;
      Arrays state = begin_use(window, stream);
      if constexpr (std::is_same_v<Float, float>) state.masters = w;
      if (is_narrow_) update_by_tensors<__nv_bfloat16>(shards, unit, range, w, g, state, u, stream);
      else if (!state.masters) update_by_tensors<float>(shards, unit, range, w, g, state, u, stream);
      else update_window(shards, unit, range, w, g, state, u, stream);
      end_use(window, stream);
    }
  }

  // Waits until the host's memory holds what the last update has computed.
  void settle() const {
    if (is_offloaded_) traffic_.settle();
  }
  // The kept values are no longer what was brought: all is brought again.
  void forget() {
    settle();
    brought_ = 0;
  }

 private:
  // Neighbouring elements of what is kept of a unit: its first element in that, and in all that is kept.
  struct Window {
    size_t number, unit_begin, kept, count;
  };
  // masters: null if there are none
  struct Arrays {
    float* masters;
    void* moments[std::size(optimizer_states)];
  };

  // range: of the unit
  template <class Float>
  static void update_window(const Shards& shards, int unit, Range range, Float* weights, const float* gradients,
                            const Arrays& state, const Update& u, cudaStream_t stream) {
    // How many of these elements lie before the unit's `decayed`
    const size_t decayed = std::max(shards.list().units()[size_t(unit)].decayed, range.begin) - range.begin;
    adamw(weights, state.masters, static_cast<float*>(state.moments[0]), static_cast<float*>(state.moments[1]), gradients,
          u.factor, u.counters, range.count, std::min(range.count, decayed), u.options, stream);
  }

  // Tensor by tensor, because random bits belong to elements of a tensor.
  template <class Moment, class Float>
  static void update_by_tensors(const Shards& shards, int unit, Range range, Float* weights, const float* gradients,
                                const Arrays& state, const Update& u, cudaStream_t stream) {
    for (const Slice& slice : shards.slices(unit, range.begin, range.count)) {
      const TensorDescriptor& tensor = *slice.tensor;
      const size_t at = slice.in_unit - range.begin;
      const RandomBits random = {random_key(u.seed, "rounding " + tensor.name),
                                 random_key(u.seed, "rounding of moments " + tensor.name), slice.first, tensor.part};
      // The rounded-up count reaches into the padding after the tensor, which is zero.
      adamw_stochastic(weights + at, state.masters ? state.masters + at : nullptr, static_cast<Moment*>(state.moments[0]) + at,
                       static_cast<Moment*>(state.moments[1]) + at, gradients + at, u.factor, u.counters,
                       round_up(slice.count, TensorList::alignment), tensor.decays(), u.options, random, stream);
    }
  }

  size_t moment_bytes() const { return is_narrow_ ? sizeof(__nv_bfloat16) : sizeof(float); }
  static size_t buffer_of(const Window& window) { return window.number % HostTraffic::buffers; }
  Arrays& kept_arrays() { return is_offloaded_ ? on_host_ : on_device_[0]; }
  const Arrays& kept_arrays() const { return is_offloaded_ ? on_host_ : on_device_[0]; }

  void take(Arena& arena, Arrays& arrays, size_t count) const {
    arrays.masters = has_masters_ ? arena.take<float>(count) : nullptr;
    for (void*& moment : arrays.moments)
      moment = is_narrow_ ? static_cast<void*>(arena.take<__nv_bfloat16>(count)) : arena.take<float>(count);
  }

  Arrays shifted(Arrays arrays, size_t kept) const {
    if (arrays.masters) arrays.masters += kept;
    for (void*& moment : arrays.moments) moment = static_cast<char*>(moment) + kept * moment_bytes();
    return arrays;
  }

  // Calls work(array, bytes) for each array, of `count` elements.
  template <class Work>
  void for_each_array(const Arrays& arrays, size_t count, Work work) const {
    if (arrays.masters) work(arrays.masters, count * sizeof(float));
    for (void* moment : arrays.moments)
      if (moment) work(moment, count * moment_bytes());
  }

  std::vector<OffloadedArray> arrays_of(const Window& window) const {
    std::vector<OffloadedArray> arrays;
    for_each_array(on_device_[buffer_of(window)], window.count, [&](void* array, size_t bytes) { arrays.push_back({array, nullptr, bytes}); });
    auto next = arrays.begin();
    for_each_array(shifted(on_host_, window.kept), window.count, [&](void* array, size_t) { next++->host = array; });
    return arrays;
  }

  // The window's arrays, which `stream` can use when it comes to what it is given next.
  Arrays begin_use(const Window& window, cudaStream_t stream) {
    if (!is_offloaded_) return shifted(on_device_[0], window.kept);
    bring_up_to(window.number);
    traffic_.wait_until_here(buffer_of(window), stream);
    return on_device_[buffer_of(window)];
  }
  void end_use(const Window& window, cudaStream_t stream) {
    if (!is_offloaded_) return;
    traffic_.end_use(buffer_of(window), stream);
    traffic_.send_back(buffer_of(window), arrays_of(window));
    bring_up_to(window.number + HostTraffic::buffers);
    if (window.number + 1 == all_.size()) brought_ = 0, bring_up_to(HostTraffic::buffers - 1);  // for the next update
  }

  // Starts to bring windows up to number `last`, of those that are still to come.
  void bring_up_to(size_t last) {
    for (; brought_ <= last && brought_ < all_.size(); ++brought_)
      traffic_.bring(buffer_of(all_[brought_]), arrays_of(all_[brought_]));
  }

  bool has_masters_, is_narrow_, is_offloaded_;
  size_t total_ = 0, largest_ = 0;           // elements of all that is kept, and of a buffer
  std::vector<std::vector<Window>> windows_;  // by unit
  std::vector<Window> all_;
  size_t brought_ = 0;                       // windows of this update that have been brought, or are on their way
  Arrays on_device_[HostTraffic::buffers] = {}, on_host_ = {};
  HostTraffic traffic_;
};
