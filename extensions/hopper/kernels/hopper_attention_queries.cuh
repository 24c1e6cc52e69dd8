// Hopper's backward pass of attention (extensions/hopper/kernels/hopper_attention_backward.cuh): its work for each query before and
// after the products: D = Σ_d dO·O, and dQ = scale · sums, rounded. Between them lies the workspace, with the sums of dQ and the
// counters that keep these sums in order.
#pragma once

#include "kernels/attention/attention_shape.h"
#include "kernels/device/common.cuh"
#include "kernels/device/maximum.cuh"

namespace hopper_attention {

// dQ's sums: for each head, and 64 queries of it, (HS/8, 64, 8) floats. Parts of a tile are added as they lie in a
// consumer's registers, and a row's 8 channels lie together.
struct Workspace {
  unsigned *ticket, *counters;  // a counter for each tile of queries
  float* sums;

  static size_t counts(const AttentionSizes& s) { return 1 + size_t(s.batch) * s.heads * ceil_div(s.queries, 64); }
  __host__ __device__ static size_t head_sums(const AttentionSizes& s) {
    return size_t(round_up(s.queries, 128)) * s.head_size;
  }
  static size_t floats(const AttentionSizes& s) {
    return round_up(counts(s), size_t(32)) + s.batch * s.heads * head_sums(s);
  }
  Workspace(float* memory, const AttentionSizes& s)
      : ticket(reinterpret_cast<unsigned*>(memory)), counters(ticket + 1),
        sums(memory + round_up(counts(s), size_t(32))) {}
};

constexpr int side_threads = 256, side_rows = 4;  // of each thread, so that it has several loads under way

// Row `number` of all heads' queries, in an order in which rows of neighbouring heads follow each other.
struct QueryRow {
  int64_t sample, query, head;

  __device__ QueryRow(int64_t number, const AttentionSizes& sizes)
      : sample(number / sizes.heads / sizes.queries), query(number / sizes.heads % sizes.queries),
        head(number % sizes.heads) {}

  template <class T>
  __device__ T* in(const Heads<T>& heads, const AttentionSizes& sizes) const {
    return heads.data + sample * heads.strides.sample + query * heads.strides.row + head * sizes.head_size;
  }
};

// row_dots (B, NH, queries). HS / 8 lanes have a row.
template <class Float, int HS>
__global__ void __launch_bounds__(side_threads)
row_dots_kernel(float* row_dots, Heads<const Float> dout, Heads<const Float> out, AttentionSizes sizes,
                unsigned* counts, int number_of_counts) {
  constexpr int lanes = HS / 8, step = side_threads / lanes;
  const int thread = blockIdx.x * side_threads + threadIdx.x;
  for (int i = thread; i < number_of_counts; i += gridDim.x * side_threads) counts[i] = 0;
  const int rows = sizes.batch * sizes.queries * sizes.heads, channel = threadIdx.x % lanes * 8;
  const int first = blockIdx.x * (step * side_rows) + threadIdx.x / lanes;
  float x[side_rows][8] = {}, y[side_rows][8] = {};
#pragma unroll
  for (int i = 0; i < side_rows; ++i) {
    const QueryRow row(first + i * step, sizes);
    if (first + i * step >= rows || channel >= sizes.head_size) continue;
    load(row.in(dout, sizes) + channel, x[i]);
    load(row.in(out, sizes) + channel, y[i]);
  }
#pragma unroll
  for (int i = 0; i < side_rows; ++i) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += x[i][k] * y[i][k];
#pragma unroll
    for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const QueryRow row(first + i * step, sizes);
    if (channel == 0 && first + i * step < rows)
      row_dots[(row.sample * sizes.heads + row.head) * sizes.queries + row.query] = sum;
  }
}

// dq = scale · sums. A thread has 8 channels of a row at a time.
template <class Gradient, class Seen>
__global__ void __launch_bounds__(side_threads)
finish_kernel(Heads<Gradient> dq, const float* sums, AttentionSizes sizes, float scale, Seen seen) {
  const int chunks = sizes.head_size / 8;
  const int64_t all = int64_t(sizes.batch) * sizes.queries * sizes.heads * chunks;
  const int64_t first = int64_t(blockIdx.x) * (side_threads * side_rows) + threadIdx.x;
  float x[side_rows][8];
#pragma unroll
  for (int i = 0; i < side_rows; ++i) {
    const int64_t number = min(first + i * side_threads, all - 1);
    const QueryRow row(number / chunks, sizes);
    const int chunk = int(number % chunks), within = int(row.query % 64);
    const int place = (2 * chunk + within / 8 % 2) * 128 + within / 16 * 32 + within % 8 * 4;  // as write_dq has it
    const float* from = sums + (row.sample * sizes.heads + row.head) * Workspace::head_sums(sizes) +
                        (row.query - within) * sizes.head_size;
    load(from + 2 * place, reinterpret_cast<float(&)[4]>(x[i][0]));
    load(from + 2 * place + 4, reinterpret_cast<float(&)[4]>(x[i][4]));
  }
#pragma unroll
  for (int i = 0; i < side_rows; ++i) {
    const int64_t number = first + i * side_threads;
    if (number >= all) continue;
    Gradient* to = QueryRow(number / chunks, sizes).in(dq, sizes) + number % chunks * 8;
#pragma unroll
    for (float& value : x[i]) value *= scale;
    seen.see(x[i]);
    constexpr int W = pack_width<Gradient> < 8 ? pack_width<Gradient> : 8;
#pragma unroll
    for (int k = 0; k < 8; k += W) store(to + k, reinterpret_cast<const float(&)[W]>(x[i][k]));
  }
  seen.raise();
}

}  // namespace hopper_attention

// The size of the workspace in floats; it must be aligned to 16 bytes.
inline size_t hopper_attention_workspace(const AttentionSizes& sizes) {
  return hopper_attention::Workspace::floats(sizes);
}
