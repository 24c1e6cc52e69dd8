// cooperative_groups.h for the CPU device: the block, and tiles of 1, 2, 4, ... 32 neighbouring threads of it.
//
// All names have the meaning that the CUDA C++ Programming Guide gives them, chapter "Cooperative Groups". Blocks of a
// grid can't wait for each other here (cpu/README.md says why), so grid_group doesn't exist. Blocks of a cluster can
// (extensions/hopper/kernels/hopper.cuh); cluster_group is not here.
#pragma once

#include "cpu/cuda_runtime.h"

namespace cooperative_groups {

class thread_block {
 public:
  static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
  static unsigned thread_rank() { return cpu::thread_rank(); }
  static void sync(cpu::Location where = cpu::Location::current()) { cpu::sync_threads(where); }
};

inline thread_block this_thread_block() { return {}; }

// Threads r·Size to r·Size + Size − 1 of the block, where r is meta_group_rank. Size divides the block's threads.
template <unsigned Size>
class thread_block_tile {
  static_assert(Size >= 1 && Size <= 32 && (Size & (Size - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads");

 public:
  static constexpr unsigned size() { return Size; }
  static unsigned thread_rank() { return thread_block::thread_rank() % Size; }
  static unsigned meta_group_rank() { return thread_block::thread_rank() / Size; }
  static unsigned meta_group_size() { return thread_block::size() / Size; }

  static void sync(cpu::Location where = cpu::Location::current()) { cpu::sync_warp(mask(), where); }

  // The value of the thread of this tile with rank `rank`, `rank ^ lanes`, `rank + delta`, `rank - delta`.
  template <class T>
  static T shfl(T value, int rank, cpu::Location where = cpu::Location::current()) {
    return __shfl_sync(mask(), value, rank, Size, where);
  }
  template <class T>
  static T shfl_xor(T value, unsigned lanes, cpu::Location where = cpu::Location::current()) {
    return __shfl_xor_sync(mask(), value, int(lanes), Size, where);
  }
  template <class T>
  static T shfl_down(T value, unsigned delta, cpu::Location where = cpu::Location::current()) {
    return __shfl_down_sync(mask(), value, delta, Size, where);
  }
  template <class T>
  static T shfl_up(T value, unsigned delta, cpu::Location where = cpu::Location::current()) {
    return __shfl_up_sync(mask(), value, delta, Size, where);
  }

  static bool any(int predicate, cpu::Location where = cpu::Location::current()) {
    return __any_sync(mask(), predicate, where);
  }
  static bool all(int predicate, cpu::Location where = cpu::Location::current()) {
    return __all_sync(mask(), predicate, where);
  }
  static unsigned ballot(int predicate, cpu::Location where = cpu::Location::current()) {  // bit 0: rank 0
    return __ballot_sync(mask(), predicate, where) >> first_lane();
  }

 private:
  static int first_lane() { return cpu::lane() & ~int(Size - 1); }
  static unsigned mask() { return (0xffffffffu >> (32 - Size)) << first_lane(); }
};

template <unsigned Size>
thread_block_tile<Size> tiled_partition(const thread_block&) {
  return {};
}

}  // namespace cooperative_groups
