// cooperative_groups/reduce.h for the CPU device: combines the values of a tile's threads; every thread gets the
// result.
//
// The tree is a butterfly from the farthest partner to the nearest, as on the GPU, so float sums have the same bits.
#pragma once

#include "cpu/cooperative_groups.h"

namespace cooperative_groups {

template <class T>
struct plus {
  T operator()(T a, T b) const { return a + b; }
};

template <class T>
struct less {  // the smaller one
  T operator()(T a, T b) const { return b < a ? b : a; }
};

template <class T>
struct greater {  // the larger one
  T operator()(T a, T b) const { return a < b ? b : a; }
};

template <unsigned Size, class T, class Operation>
T reduce(const thread_block_tile<Size>& tile, T value, Operation operation,
         cpu::Location where = cpu::Location::current()) {
  for (unsigned lanes = Size / 2; lanes > 0; lanes /= 2) value = operation(value, tile.shfl_xor(value, lanes, where));
  return value;
}

}  // namespace cooperative_groups
