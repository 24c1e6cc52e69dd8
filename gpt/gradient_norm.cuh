// The part of a rank in the norm of all gradients (kernels/norm.cuh): the squares of the elements that it owns. They are
// added up by windows of a unit, so that the norm has the same bits where gradients come to the device in such windows
// (offloaded_gradients.cuh).
#pragma once

#include <vector>

#include "gpt/shards.h"
#include "kernels/device/memory.cuh"
#include "kernels/norm.cuh"

class GradientNorm {
 public:
  explicit GradientNorm(int units) : owned_(size_t(units)) {}

  // The part that this rank owns of a window. kept: number of the first element that it keeps of the unit
  void add_window(int unit, const Range& owned, size_t kept) {
    if (owned.count > 0) owned_[size_t(unit)].push_back({owned.begin - kept, owned.count});
  }

  void lay_out(Arena& arena) {
    size_t partials = 0;
    for (const std::vector<Range>& windows : owned_)
      for (const Range& window : windows) partials += partial_sums<float>(window.count);
    partials_ = arena.take<float>(partials);
    total_ = arena.take<double>(1);
  }

  void begin() { partials_so_far_ = 0; }
  // values: of the unit's elements from number `first` on, `count` of them, which are whole windows
  void add(int unit, const float* values, size_t first, size_t count, cudaStream_t stream) {
    for (const Range& window : owned_[size_t(unit)]) {  // counted from the first element that is kept
      if (window.begin < first || window.begin >= first + count) continue;
      square_sums(partials_ + partials_so_far_, values + (window.begin - first), window.count, stream);
      partials_so_far_ += partial_sums<float>(window.count);
    }
  }
  // The sum of all squares since begin(), in device memory.
  double* total(cudaStream_t stream) {
    add_up(total_, partials_, partials_so_far_, stream);
    return total_;
  }

 private:
  std::vector<std::vector<Range>> owned_;  // windows by unit
  float* partials_ = nullptr;
  double* total_ = nullptr;
  size_t partials_so_far_ = 0;
};
