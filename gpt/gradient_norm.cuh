// The part of a rank in the norm of all gradients (kernels/norm.cuh): the squares of the elements that it owns. They are
// added up by windows of a unit, so that the norm has the same bits where gradients come to the device in such windows
// (offloaded_gradients.cuh).
#pragma once

#include <algorithm>
#include <vector>

#include "gpt/shards.h"
#include "kernels/device/memory.cuh"
#include "kernels/norm.cuh"

class GradientNorm {
 public:
  GradientNorm(const Shards& shards, const Kept& kept) {
    for (const Window& window : kept.windows()) {
      const Range all = shards.owned(window.unit);
      const size_t kept_from = kept.begin(window.unit), begin = kept_from + window.begin;
      const size_t first = std::max(all.begin, begin), end = std::min(all.begin + all.count, begin + window.count);
      if (first >= end) continue;
      owned_.push_back({window.unit, first - kept_from, end - first, count_});
      count_ += partial_sums<float>(end - first);
    }
  }

  void lay_out(Arena& arena) {
    partials_ = arena.take<float>(count_);
    total_ = arena.take<double>(1);
  }

  // values: of the unit's elements from number `first` on, `count` of them, which are whole windows
  void add(int unit, const float* values, size_t first, size_t count, cudaStream_t stream) {
    for (const Owned& part : std::ranges::equal_range(owned_, unit, {}, &Owned::unit))
      if (first <= part.begin && part.begin < first + count)
        square_sums(partials_ + part.partials, values + (part.begin - first), part.count, stream);
  }
  // The sum of all squares, when all units have been added, in device memory.
  double* total(cudaStream_t stream) {
    add_up(total_, partials_, count_, stream);
    return total_;
  }

 private:
  // What this rank owns of a window. begin: counted from the first element that it keeps of the unit; partials: the number of
  // its first partial sum
  struct Owned {
    int unit;
    size_t begin, count, partials;
  };
  std::vector<Owned> owned_;
  size_t count_ = 0;  // of all partial sums
  float* partials_ = nullptr;
  double* total_ = nullptr;
};
