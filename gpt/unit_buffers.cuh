// The unit buffers of the parameter store (zero.cuh): each is device memory for one whole unit.
//
// Every unit has a buffer of its own; or the buffers are a ring: the embedding and the final norm have their own, and
// the blocks take turns in two between them.
#pragma once

#include <algorithm>
#include <ranges>
#include <vector>

#include "gpt/shards.h"
#include "kernels/device/event.cuh"
#include "kernels/device/memory.cuh"

// E: the type of an element.
template <class E>
struct UnitBuffer {
  E* data = nullptr;
  size_t count = 0;
  int unit = -1;        // the unit whose valid weights are in the buffer; -1: none
  Event moved;          // recorded after the last gather into the buffer or reduction out of it
  bool moving = false;  // the model's stream has not waited for `moved` yet
};

template <class E>
class UnitBuffers {
 public:
  UnitBuffers(const Shards& shards, bool is_ring)
      : shards_(shards), is_ring_(is_ring), buffers_(is_ring ? 2 + std::min(2, blocks()) : shards.units()) {}

  // base: an array of all whole units, for buffers that are no ring; null: there is no memory yet.
  void lay_out(E* base) {
    for (int unit = 0; unit < shards_.units(); ++unit) {
      buffers_[unit].data = base ? base + shards_.whole_offset(unit) : nullptr;
      buffers_[unit].count = shards_.whole(unit);
    }
  }
  // Takes the memory of a ring. elements(unit): of a unit in its buffer
  template <class Elements>
  void lay_out(Arena& arena, Elements elements) {
    const int last = shards_.units() - 1;
    size_t block = 0;  // elements of the largest block; blocks of other stages have none here
    for (int unit = 1; unit < last; ++unit) block = std::max(block, elements(unit));
    for (UnitBuffer<E>& buffer : buffers_) {
      buffer.count = &buffer == &buffers_.front() ? elements(0) : &buffer == &buffers_.back() ? elements(last) : block;
      buffer.data = arena.take<E>(buffer.count);
    }
  }

  auto begin() { return buffers_.begin(); }
  auto end() { return buffers_.end(); }
  auto begin() const { return buffers_.begin(); }
  auto end() const { return buffers_.end(); }

  // The buffer of a unit. In a ring, neighbouring blocks have different ones.
  UnitBuffer<E>& of(int unit) {
    if (unit == 0) return buffers_.front();
    if (unit == shards_.units() - 1) return buffers_.back();
    return buffers_[1 + (unit - 1) % (buffers_.size() - 2)];
  }

  // The buffer where a unit's weights are, or can be gathered. In a ring that is not the buffer of the block `used`.
  UnitBuffer<E>& find(int unit, int used) {
    if (!is_ring_ || !shards_.list().is_block(unit)) return of(unit);
    UnitBuffer<E>&one = buffers_[1], &other = buffers_[buffers_.size() - 2];
    return one.unit == unit || (other.unit != unit && one.unit != used) ? one : other;
  }

 private:
  int blocks() const {
    const auto is_here = [this](int unit) { return shards_.list().has(unit); };
    return int(std::ranges::count_if(std::views::iota(1, shards_.units() - 1), is_here));
  }

  const Shards& shards_;
  bool is_ring_;
  std::vector<UnitBuffer<E>> buffers_;
};
