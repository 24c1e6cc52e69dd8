// Masters and moments of what a rank keeps (zero.cuh): where they lie, and how they come to the update.
//
// They lie on the device, as the weights do; or, with --offload optimizer, in pinned memory of the host. Then the
// update takes them in *windows*, neighbouring elements of one unit, as many as this rank keeps of a block; a larger
// unit, the embedding, has several. While one window is updated, the next one comes and the one before goes back
// (offload.cuh). The first two come behind forward and backward, and the last two leave behind the next forward.
//
// Moments are float, or bf16 (--moments bf16; kernels/adamw.cuh).
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "extensions/offload/offload.cuh"
#include "gpt/parameters.h"
#include "kernels/adamw.cuh"

// What the update of a unit has beside masters and moments.
template <class Float>
struct UnitUpdate {
  Float* weights;  // of what this rank keeps of the unit
  size_t begin;    // number of the first of these elements in the unit
  const float* gradients;  // of `count` of these elements, which are updated, from number `first` on
  size_t first, count;
  const AdamW& options;
  const float* factor;         // in device memory, as the counters (kernels/adamw.cuh)
  const AdamWState* counters;
  uint64_t seed;  // of stochastic rounding
};

class OptimizerState {
 public:
  // kept: how many elements this rank keeps of each unit; the first unit is the embedding, the last the final norm.
  OptimizerState(const std::vector<size_t>& kept, bool has_masters, const StoreOptions& options)
      : is_narrow_(options.narrow_moments) {
    if (options.training && options.offload.optimizer) traffic_.emplace("optimizer");
    if (has_masters) arrays_.push_back({State::weight, sizeof(float)});
    for (State moment : optimizer_states) arrays_.push_back({moment, is_narrow_ ? sizeof(__nv_bfloat16) : sizeof(float)});
    largest_ = *std::max_element(kept.begin() + (is_offloaded() ? 1 : 0), kept.end());
    total_ = std::accumulate(kept.begin(), kept.end(), size_t(0));
    windows_ = windows_of(kept, largest_);
  }

  bool has_masters() const { return arrays_.front().state == State::weight; }
  bool is_offloaded() const { return traffic_.has_value(); }

  // All of it, or two windows; and what the host has.
  void lay_out(Arena& arena) {
    for (Array& array : arrays_)
      for (size_t i = 0; i < (is_offloaded() ? HostTraffic::buffers : 1); ++i)
        array.on_device[i] = arena.take<char>(array.width * (is_offloaded() ? largest_ : total_));
  }
  void add_to(PinnedMemory& host_memory) {
    const auto lay_out = [this](Arena& arena) {
      for (Array& array : arrays_) array.on_host = arena.take<char>(array.width * total_);
    };
    if (is_offloaded()) host_memory.add("optimizer", lay_out);
  }

  // Sets all to zero.
  void clear(cudaStream_t stream) {
    forget();
    for (const Array& array : arrays_)
      if (is_offloaded()) clear_on_host(array.on_host, array.width * total_);
      else CUDA_CHECK(cudaMemsetAsync(array.on_device[0], 0, array.width * total_, stream));
  }

  // Calls work(values): values of a state from element number `kept` of all that is kept, in device or host memory.
  template <class Work>
  void with(State state, size_t kept, Work work) const {
    const Array& array = *std::ranges::find(arrays_, state, &Array::state);
    char* const values = (is_offloaded() ? array.on_host : array.on_device[0]) + kept * array.width;
    if (array.width == sizeof(float)) work(reinterpret_cast<float*>(values));
    else work(reinterpret_cast<__nv_bfloat16*>(values));
  }

  // Masters on the device, from element number `kept` on.
  float* masters(size_t kept) const { return reinterpret_cast<float*>(arrays_.front().on_device[0]) + kept; }

  // Updates elements of what this rank keeps of a unit: all, or a window. An update of the model takes all units in order.
  template <class Float>
  void update(const Shards& shards, int unit, const UnitUpdate<Float>& u, cudaStream_t stream) {
    for (size_t i = 0; i < windows_.size(); ++i) {
      if (windows_[i].unit != unit || windows_[i].begin - u.first >= u.count) continue;  // less than 0 is much
      if (!is_offloaded()) {
        update_window(shards, i, u, stream);
        continue;
      }
      const size_t buffer = i % HostTraffic::buffers;
      bring_up_to(i);
      traffic_->wait_until_here(buffer, stream);
      update_window(shards, i, u, stream);
      traffic_->end_use(buffer, stream);
      traffic_->send_back(buffer, arrays_of(i));
      bring_up_to(i + HostTraffic::buffers);
      if (i + 1 == windows_.size()) brought_ = 0, bring_up_to(HostTraffic::buffers - 1);  // for the next update
    }
  }

  // Waits until the host's memory holds what the last update has computed.
  void settle() const {
    if (is_offloaded()) traffic_->settle();
  }
  // The kept values are no longer what was brought: all is brought again.
  void forget() {
    settle();
    brought_ = 0;
  }

 private:
  struct Array {
    State state;
    size_t width;  // bytes of an element
    char *on_device[HostTraffic::buffers] = {}, *on_host = nullptr;
  };

  // A state of a window on the device, from its first element on.
  template <class T>
  T* on_device(State state, size_t window) const {
    const Array& array = *std::ranges::find(arrays_, state, &Array::state);
    return reinterpret_cast<T*>(is_offloaded() ? array.on_device[window % HostTraffic::buffers]
                                               : array.on_device[0] + windows_[window].kept * array.width);
  }

  template <class Float>
  void update_window(const Shards& shards, size_t number, const UnitUpdate<Float>& u, cudaStream_t stream) const {
    const Window& window = windows_[number];
    const size_t begin = u.begin + window.begin;
    Float* const weights = u.weights + window.begin;
    const float* const gradients = u.gradients + (window.begin - u.first);
    float* masters = has_masters() ? on_device<float>(State::weight, number) : nullptr;
    if constexpr (std::is_same_v<Float, float>) masters = masters ? masters : weights;
    if (masters && !is_narrow_) {
      // How many of these elements lie before the unit's `decayed`
      const size_t decayed = std::max(shards.list().units()[size_t(window.unit)].decayed, begin) - begin;
      return adamw(weights, masters, on_device<float>(State::first_moment, number), on_device<float>(State::second_moment, number),
                   gradients, u.factor, u.counters, window.count, std::min(window.count, decayed), u.options, stream);
    }
    for (const Slice& slice : shards.slices(window.unit, begin, window.count)) {  // random bits belong to elements of a tensor
      const TensorDescriptor& tensor = *slice.tensor;
      const size_t own = slice.in_unit - begin;
      const RandomBits random = {random_key(u.seed, "rounding " + tensor.name),
                                 random_key(u.seed, "rounding of moments " + tensor.name), slice.first, tensor.part};
      const auto round = [&](auto* first, auto* second) {  // the rounded-up count reaches into padding, which is zero
        adamw_stochastic(weights + own, masters ? masters + own : nullptr, first + own, second + own, gradients + own,
                         u.factor, u.counters, round_up(slice.count, shards.list().alignment()), tensor.decays(), u.options, random, stream);
      };
      if (is_narrow_) round(on_device<__nv_bfloat16>(State::first_moment, number), on_device<__nv_bfloat16>(State::second_moment, number));
      else round(on_device<float>(State::first_moment, number), on_device<float>(State::second_moment, number));
    }
  }

  std::vector<OffloadedArray> arrays_of(size_t window) const {
    std::vector<OffloadedArray> arrays;
    for (const Array& array : arrays_)
      arrays.push_back({array.on_device[window % HostTraffic::buffers], array.on_host + windows_[window].kept * array.width,
                        windows_[window].count * array.width});
    return arrays;
  }

  // Starts to bring windows up to number `last`, of those that are still to come.
  void bring_up_to(size_t last) {
    for (; brought_ <= last && brought_ < windows_.size(); ++brought_)
      traffic_->bring(brought_ % HostTraffic::buffers, arrays_of(brought_));
  }

  bool is_narrow_;
  size_t total_ = 0, largest_ = 0;  // elements of all that is kept, and of a window
  std::vector<Array> arrays_;
  std::vector<Window> windows_;     // of all units, in order
  size_t brought_ = 0;              // windows for this update that are there, or on their way
  std::optional<HostTraffic> traffic_;
};
