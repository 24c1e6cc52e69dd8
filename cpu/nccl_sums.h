// The sums of NCCL's collectives (cpu/nccl.cpp): element types, operations, and the two orders of additions.
//
// direct   The ranks' elements are added in rank order, in float for 16-bit types, and rounded once.
// ring     As NCCL's rings add (src/device/all_reduce.h and reduce_scatter.h): a partial sum travels from rank to rank,
//          and each rank adds its own element and rounds to the element type before it sends the sum on. Where the ring
//          begins differs from block to block, because NCCL cuts a buffer into chunks and channels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/cuda_bf16.h"
#include "cpu/cuda_fp16.h"
#include "cpu/nccl.h"
#include "cpu/workers.h"

namespace cpu {

inline size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

struct SumOrder {
  bool is_ring = false;
  size_t first_rank = 0;  // in a ring, where block 0 begins; each block begins one rank after the block before it
};
constexpr size_t sum_block = 1024;  // elements

template <class Sum>
Sum combine(Sum a, Sum b, ncclRedOp_t operation) {
  if (operation == ncclMax) return std::max(a, b);
  if (operation == ncclMin) return std::min(a, b);
  return a + b;
}

// out = sources[0] ∘ sources[1] ∘ ..., in type Sum, one source per rank. `out` may be one of the sources.
template <class T, class Sum>
void reduce(void* out, const std::vector<const char*>& sources, size_t count, ncclRedOp_t operation, SumOrder order) {
  const size_t ranks = sources.size();
  parallel_for((count + sum_block - 1) / sum_block, 16, [&](size_t block) {
    const size_t first = block * sum_block, n = std::min(sum_block, count - first);
    const size_t first_rank = order.is_ring ? order.first_rank + block : 0;
    const auto values = [&](size_t hop) { return reinterpret_cast<const T*>(sources[(first_rank + hop) % ranks]); };
    Sum sums[sum_block];
    std::copy_n(values(0) + first, n, sums);
    for (size_t hop = 1; hop < ranks; ++hop) {
      const T* own = values(hop) + first;
      for (size_t i = 0; i < n; ++i) sums[i] = combine(sums[i], Sum(own[i]), operation);
      if (order.is_ring)
        for (size_t i = 0; i < n; ++i) sums[i] = Sum(T(sums[i]));
    }
    if (operation == ncclAvg)
      for (size_t i = 0; i < n; ++i) sums[i] /= Sum(ranks);
    for (size_t i = 0; i < n; ++i) static_cast<T*>(out)[first + i] = T(sums[i]);
  });
}

inline void reduce(void* out, const std::vector<const char*>& sources, size_t count, ncclDataType_t type,
                   ncclRedOp_t operation, SumOrder order) {
  switch (type) {
    case ncclUint8: return reduce<uint8_t, int>(out, sources, count, operation, order);
    case ncclInt32: return reduce<int, int>(out, sources, count, operation, order);
    case ncclUint64: return reduce<uint64_t, uint64_t>(out, sources, count, operation, order);
    case ncclFloat16: return reduce<__half, float>(out, sources, count, operation, order);
    case ncclBfloat16: return reduce<__nv_bfloat16, float>(out, sources, count, operation, order);
    case ncclFloat32: return reduce<float, float>(out, sources, count, operation, order);
    case ncclFloat64: return reduce<double, double>(out, sources, count, operation, order);
  }
}

}  // namespace cpu
