// Cheap statistics of a tensor, to compare two runs or two ranks without moving the tensor.
//
//   sum = Σ x_i,   absolute_maximum = max |x_i|,   checksum = Σ bits(x_i) · h(i)  mod 2^64
//
// h(i) is odd, so that any change of one element changes the checksum. It is a hash of i, so that two elements that
// change places change it too. A sum of integers is the same in any order, so the checksum does not depend on threads
// or device. The sum is in double; kernels/sums.cuh says in which order. NaN counts as larger than infinity.
//
// Reads count elements once, plus at most `most_sum_blocks` partial results of 24 bytes. About 2 FLOPs per element.
#pragma once

#include "kernels/sums.cuh"

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
__device__ inline uint32_t bits_of(__nv_fp8_e4m3 x) { return x.__x; }
__device__ inline uint32_t bits_of(__nv_fp8_e5m2 x) { return x.__x; }

// The bits of |x|. As integers they have the same order as the numbers, NaN last.
__device__ inline uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ inline void operator+=(TensorStatistics& total, const TensorStatistics& part) {
  total.sum += part.sum;
  total.checksum += part.checksum;
  if (magnitude_bits(part.absolute_maximum) > magnitude_bits(total.absolute_maximum))
    total.absolute_maximum = part.absolute_maximum;
}

// Adds elements to a total, or partial results.
struct AddStatistics {
  template <class T, int N, int count>
  __device__ void operator()(TensorStatistics& total, const PackWords<T, N> (&packs)[count], size_t i,
                             size_t step) const {
    double sum_of_element[N] = {};  // over element k of the packs
    uint32_t largest = magnitude_bits(total.absolute_maximum);
#pragma unroll
    for (int p = 0; p < count; ++p)
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const T value = reinterpret_cast<const T*>(packs[p].words)[k];
        sum_of_element[k] += to_float(value);
        total.checksum += bits_of(value) * position_hash(i + p * step + k);
        largest = max(largest, magnitude_bits(to_float(value)));
      }
#pragma unroll
    for (int k = 0; k < N; ++k) total.sum += sum_of_element[k];
    total.absolute_maximum = __uint_as_float(largest);
  }
  template <int count>
  __device__ void operator()(TensorStatistics& total, const PackWords<TensorStatistics, 1> (&parts)[count], size_t,
                             size_t) const {
    for (const auto& part : parts) total += reinterpret_cast<const TensorStatistics&>(part);
  }
};

// *result (device memory) = the statistics of values (count), which need not be aligned to a pack. workspace:
// partial_sums<T>(count) elements.
template <class T>
void tensor_statistics(TensorStatistics* result, const T* values, size_t count, TensorStatistics* workspace,
                       cudaStream_t stream) {
  KernelRange range("tensor_statistics", stream, {double(count) * sizeof(T), 2.0 * count});
  const size_t blocks = partial_sums<T>(count);
  const int elements_past_a_pack = int(reinterpret_cast<uintptr_t>(values) % pack_bytes / sizeof(T));
  with_pack<T>(elements_past_a_pack, [&](auto N) {
    sum_kernel<TensorStatistics, N>
        <<<unsigned(blocks), sum_block, 0, stream>>>(workspace, values, count, false, AddStatistics{});
  });
  sum_kernel<TensorStatistics, 1><<<1, sum_block, 0, stream>>>(result, workspace, blocks, false, AddStatistics{});
}
