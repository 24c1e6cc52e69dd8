// The parameter store: where weights, gradients and optimizer state live, and the update that turns one into the other.
// The model asks for units and never for memory, so that its code stays the same when a store shards them.
//
// Arrays have TensorList::padded_count() elements, units one after another:
//   weights    T      what the model computes with
//   gradients  float  sums over the micro-steps of a step, whatever T is
//   masters    float  what AdamW updates; in fp32 the weights themselves. None with stochastic rounding
//   first, second  float  AdamW's moments
// Padding is zero everywhere and stays so: its gradient is zero.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/adamw.cuh"
#include "kernels/norm.cuh"
#include "kernels/random.cuh"
#include "parallel/memory.cuh"
#include "parallel/tensors.h"

enum class State { weight, first_moment, second_moment };

template <class T>
__global__ void convert_kernel(T* out, const float* input, size_t count) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(input[i]);
}

template <class T>
class ParameterStore {
 public:
  static constexpr bool is_float = std::is_same_v<T, float>;

  // Adds its categories to `memory`; usable when that has been allocated and clear() called. Without `training` there
  // are weights alone.
  ParameterStore(const TensorList& list, bool training, bool stochastic_rounding, uint64_t seed, DeviceMemory& memory,
                 cudaStream_t stream)
      : list_(list), has_masters_(training && !is_float && !stochastic_rounding), seed_(seed),
        stream_(stream) {
    const size_t count = list.padded_count(), norm_floats = norm_workspace(count);
    memory.add("weights", [=, this](Arena& arena) { weights_ = arena.take<T>(count); });
    if (!training) return;
    memory.add("gradients", [=, this](Arena& arena) {
      gradients_ = arena.take<float>(count);
      norm_workspace_ = arena.take<float>(norm_floats);
      norm_ = arena.take<float>(1);
      factor_ = arena.take<float>(1);
    });
    memory.add("optimizer", [=, this](Arena& arena) {
      masters_ = has_masters_ ? arena.take<float>(count) : nullptr;
      first_ = arena.take<float>(count);
      second_ = arena.take<float>(count);
    });
  }

  T* acquire(int unit) const { return weights_ + list_.units()[unit].offset; }
  float* gradients(int unit) const { return gradients_ + list_.units()[unit].offset; }
  const float* norm() const { return norm_; }  // of the last step's gradients before clipping; device memory

  // All zero, padding included.
  void clear() {
    clear(weights_);
    for (float* array : {gradients_, masters_, first_, second_})
      if (array) clear(array);
  }

  // Fresh weights drawn from the seed (training stores only; gradients serve as scratch and are zero again after it).
  void initialize() {
    for (const TensorDescriptor& tensor : list_.tensors()) {
      const size_t offset = list_.offset(tensor), count = tensor.count();
      if (tensor.initial == Initial::one) copy_in(tensor, State::weight, std::vector<float>(count, 1.0f));
      if (tensor.initial == Initial::one || tensor.initial == Initial::zero) continue;
      float* out = float_weights() ? float_weights() : gradients_;
      fill_normal(out + offset, count, random_key(seed_, tensor.name), list_.standard_deviation(tensor), stream_);
      if constexpr (!is_float) round_weights(out + offset, offset, count);
    }
    clear(gradients_);
  }

  // Host copies of a tensor, unpadded, in float.
  void copy_out(const TensorDescriptor& tensor, State state, std::vector<float>& to) const {
    const size_t offset = list_.offset(tensor), count = tensor.count();
    to.resize(count);
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    if (!array(state)) {
      std::vector<T> narrow(count);
      CUDA_CHECK(cudaMemcpy(narrow.data(), weights_ + offset, count * sizeof(T), cudaMemcpyDeviceToHost));
      std::transform(narrow.begin(), narrow.end(), to.begin(), [](T x) { return to_float(x); });
    } else {
      CUDA_CHECK(cudaMemcpy(to.data(), array(state) + offset, count * sizeof(float), cudaMemcpyDeviceToHost));
    }
  }

  void copy_in(const TensorDescriptor& tensor, State state, const std::vector<float>& from) {
    const size_t offset = list_.offset(tensor), bytes = tensor.count() * sizeof(float);
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    if (array(state))
      CUDA_CHECK(cudaMemcpy(array(state) + offset, from.data(), bytes, cudaMemcpyHostToDevice));
    if (state == State::weight && !is_float) {
      std::vector<T> narrow(from.size());
      std::transform(from.begin(), from.end(), narrow.begin(), [](float x) { return from_float<T>(x); });
      CUDA_CHECK(cudaMemcpy(weights_ + offset, narrow.data(), bytes / sizeof(float) * sizeof(T), cudaMemcpyHostToDevice));
    }
  }

  std::vector<float> gradient(const TensorDescriptor& tensor) const {  // for tests
    std::vector<float> values(tensor.count());
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    CUDA_CHECK(cudaMemcpy(values.data(), gradients_ + list_.offset(tensor), values.size() * sizeof(float),
                          cudaMemcpyDeviceToHost));
    return values;
  }

  // Clips the gradients by their global norm and applies AdamW. `step` counts updates from 1.
  void update(const AdamW& options, float clip, long step) {
    gradient_norm(norm_, factor_, gradients_, list_.padded_count(), clip, norm_workspace_, stream_);
    const AdamWStep constants = adamw_step(options, step);
    for (const Unit& unit : list_.units()) update_unit(unit, constants, step);
  }

 private:
  void update_unit(const Unit& unit, const AdamWStep& constants, long step) {
    const size_t o = unit.offset;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      if (!has_masters_) {
        adamw_stochastic(weights_ + o, first_ + o, second_ + o, gradients_ + o, factor_, unit.count, unit.decayed,
                         constants, random_key(seed_, "stochastic rounding") + uint64_t(step), o / 4, stream_);
        return;
      }
    }
    adamw(weights_ + o, float_weights() + o, first_ + o, second_ + o, gradients_ + o, factor_, unit.count,
          unit.decayed, constants, stream_);
  }

  // Where the weights are kept in float; null: nowhere.
  float* float_weights() const {
    if constexpr (is_float) return weights_;
    else return masters_;
  }

  float* array(State state) const {
    return state == State::weight ? float_weights() : state == State::first_moment ? first_ : second_;
  }

  void round_weights(const float* from, size_t offset, size_t count) {
    convert_kernel<T><<<unsigned(ceil_div(count, size_t(256))), 256, 0, stream_>>>(weights_ + offset, from, count);
    CUDA_CHECK(cudaGetLastError());
  }

  template <class Element>
  void clear(Element* array) {
    CUDA_CHECK(cudaMemsetAsync(array, 0, list_.padded_count() * sizeof(Element), stream_));
  }

  const TensorList& list_;
  bool has_masters_;
  uint64_t seed_;
  cudaStream_t stream_;
  T* weights_ = nullptr;
  float *gradients_ = nullptr, *masters_ = nullptr, *first_ = nullptr, *second_ = nullptr;
  float *norm_workspace_ = nullptr, *norm_ = nullptr, *factor_ = nullptr;
};
