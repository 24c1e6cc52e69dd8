// Cheap statistics of a tensor, to compare two runs or two ranks without moving the tensor.
//
//   sum = Σ x_i,   absolute_maximum = max |x_i|,   checksum = Σ bits(x_i) · h(i)  mod 2^64
//
// h(i) is odd, so that any change of one element changes the checksum. It is a hash of i, so that two elements that
// change places change it too. A sum of integers is the same in any order, so the checksum does not depend on threads
// or device. The sum is in double; count, type and device determine its order. NaN counts as larger than infinity.
//
// A block walks over a contiguous span, each thread one pack at a time. Each thread writes one partial result, and one
// block adds these. Reads count elements once, plus at most 65,536 partial results of 24 bytes. About 2 FLOPs per
// element.
#pragma once

#include <algorithm>

#include "kernels/device/common.cuh"

constexpr int statistics_block = 256, statistics_packs = 8;  // a thread reads at least so many packs of a long tensor
constexpr size_t statistics_blocks = 256;                    // at most so many blocks

struct TensorStatistics {
  double sum;
  uint64_t checksum;
  float absolute_maximum;
};

// One round of splitmix64 (Steele, Lea, Flood 2014), made odd.
__host__ __device__ inline uint64_t position_hash(uint64_t position) {
  uint64_t z = (position + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  return (z ^ z >> 27) | 1;
}

__device__ inline uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ inline uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
__device__ inline uint32_t bits_of(__half x) { return __half_as_ushort(x); }

// The bits of |x|. As integers they have the same order as the numbers, NaN last.
__device__ inline uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ inline void add_statistics(TensorStatistics& total, const TensorStatistics& part) {
  total.sum += part.sum;
  total.checksum += part.checksum;
  if (magnitude_bits(part.absolute_maximum) > magnitude_bits(total.absolute_maximum))
    total.absolute_maximum = part.absolute_maximum;
}

template <class T, int N>
__global__ void partial_statistics_kernel(TensorStatistics* partials, const T* values, size_t count, size_t span) {
  const size_t first = blockIdx.x * span, last = first + span < count ? first + span : count;
  double sums[N] = {};
  uint64_t checksums[N] = {};
  uint32_t largest[N] = {};
  for (size_t i = first + threadIdx.x * N; i < last; i += size_t(blockDim.x) * N) {
    Pack<T, N> pack;
    if (i + N <= count) {
      pack = *reinterpret_cast<const Pack<T, N>*>(values + i);
    } else {  // zeros add nothing
      for (int k = 0; k < N; ++k) pack.values[k] = i + k < count ? values[i + k] : from_float<T>(0);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float x = to_float(pack.values[k]);
      sums[k] += x;
      checksums[k] += bits_of(pack.values[k]) * position_hash(i + k);
      largest[k] = magnitude_bits(x) > largest[k] ? magnitude_bits(x) : largest[k];
    }
  }
  TensorStatistics total = {};
#pragma unroll
  for (int k = 0; k < N; ++k) add_statistics(total, {sums[k], checksums[k], __uint_as_float(largest[k])});
  partials[size_t(blockIdx.x) * blockDim.x + threadIdx.x] = total;
}

[[maybe_unused]] static
__global__ void total_statistics_kernel(TensorStatistics* result, const TensorStatistics* partials, int count) {
  __shared__ TensorStatistics totals[statistics_block];
  TensorStatistics total = {};
  for (int i = threadIdx.x; i < count; i += blockDim.x) add_statistics(total, partials[i]);
  totals[threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (unsigned i = 1; i < blockDim.x; ++i) add_statistics(total, totals[i]);
  *result = total;
}

// The number of elements that each block reads.
template <class T>
size_t statistics_span(size_t count) {
  constexpr size_t unit = size_t(statistics_block * statistics_packs) * pack_width<T>;
  return round_up(std::max<size_t>(ceil_div(count, statistics_blocks), 1), unit);
}

// The number of elements of workspace that tensor_statistics needs.
template <class T>
size_t tensor_statistics_workspace(size_t count) {
  return std::max<size_t>(ceil_div(count, statistics_span<T>(count)), 1) * statistics_block;
}

// *result (device memory) = the statistics of values (count), which need not be aligned to a pack.
template <class T>
void tensor_statistics(TensorStatistics* result, const T* values, size_t count, TensorStatistics* workspace,
                       cudaStream_t stream) {
  KernelRange range("tensor_statistics", stream, double(count) * sizeof(T), 2.0 * count);
  const size_t partials = tensor_statistics_workspace<T>(count);
  const int elements_past_a_pack = int(reinterpret_cast<uintptr_t>(values) % pack_bytes / sizeof(T));
  with_pack<T>(elements_past_a_pack, [&](auto width) {
    constexpr int N = decltype(width)::value;
    partial_statistics_kernel<T, N><<<unsigned(partials / statistics_block), statistics_block, 0, stream>>>(
        workspace, values, count, statistics_span<T>(count));
  });
  total_statistics_kernel<<<1, statistics_block, 0, stream>>>(result, workspace, int(partials));
  CUDA_CHECK(cudaGetLastError());
}
