// Sums of long arrays: of squares (kernels/norm.cuh), of losses (kernels/cross_entropy.cuh), and statistics of tensors
// (runtime/checks/kernels/statistics.cuh). The order of the additions depends only on count, type and device, so a sum has the same
// bits in every run.
//
// Two launches. In the first, each block adds up its share of the array and writes one partial sum. In the second, one
// block adds up all partial sums. A thread loads eight packs, which lie a block's width apart, before it uses the
// first; then the block adds the sums of its threads in a tree. A short array needs only one launch, of one block.
// Reads the array once, and at most `most_sum_blocks` partial sums.
// Its barriers are tested by test_norm.
#pragma once

#include <algorithm>

#include "kernels/device/common.cuh"

constexpr int sum_packs = 8;  // loaded by a thread before it uses the first
constexpr size_t most_sum_blocks = 16 * sum_block;

// Block b writes sums[b], or adds to it if `accumulate`. add(total, packs, i, step) adds packs to a thread's total:
// their first elements have the numbers i, i + step, ... Zeros must add nothing. Block 0 adds the elements behind the
// last whole pack.
template <class Total, int N, class Sum, class T, class Add>
__global__ void __launch_bounds__(sum_block)
sum_kernel(Sum* sums, const T* values, size_t count, bool accumulate, Add add) {
  constexpr size_t step = sum_block * N, round = sum_packs * step;
  __shared__ Total totals[sum_block];
  const int thread = threadIdx.x;
  const size_t whole = count / N * N, span = round_up(ceil_div(whole, size_t(gridDim.x)), round);
  const size_t first = blockIdx.x * span, last = min(first + span, whole);
  Total total = accumulate && thread == 0 ? Total(sums[blockIdx.x]) : Total{};
  for (size_t i = first + thread * N; i < last; i += round) {
    PackWords<T, N> packs[sum_packs] = {};
#pragma unroll
    for (int p = 0; p < sum_packs; ++p)
      if (i + p * step < last) packs[p] = load_pack<N>(values + i + p * step);
    add(total, packs, i, step);
  }
  if (N > 1 && blockIdx.x == 0)
    for (size_t i = whole + thread; i < count; i += sum_block) {
      const PackWords<T, 1> element[] = {load_pack<1>(values + i)};
      add(total, element, i, step);
    }
  totals[thread] = total;
  for (int half = sum_block / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) totals[thread] += totals[thread + half];
  }
  if (thread == 0) sums[blockIdx.x] = Sum(totals[0]);
}

// The number of partial sums of `count` elements.
template <class T>
size_t partial_sums(size_t count) {
  return std::clamp(ceil_div(count, size_t(sum_block * sum_packs * pack_width<T>)), size_t(1), most_sum_blocks);
}

// Adds to a total the sum of floats, or of their squares, times `scale`.
template <bool squares>
struct AddFloats {
  float scale = 1;

  template <int N, int count>
  __device__ void operator()(double& total, const PackWords<float, N> (&packs)[count], size_t, size_t) const {
    float sum = 0, sum_of_element[N] = {}, x[N];  // sum_of_element[k]: over element k of the packs
#pragma unroll
    for (const PackWords<float, N>& pack : packs) {
      unpack(pack, x);
#pragma unroll
      for (int k = 0; k < N; ++k) sum_of_element[k] += squares ? x[k] * x[k] : x[k];
    }
#pragma unroll
    for (int k = 0; k < N; ++k) sum += sum_of_element[k];
    total += sum * scale;
  }
};
