// Shared by the ladders of attention's two passes: inputs, shapes, the check, and how the early rungs go through a head.
// kernels/attention/attention.cuh has the maths and the tensors: qkv (B, T, 3, NH, HS), out (B, T, NH, HS), lse (B, NH, T).
//
// Every kernel here runs on a grid (x, NH, B): the position of a block in the grid says which head it works on, as in
// kernels/attention/flash_attention.cuh, whose head_statistics() finds the head in a tensor. A *pair* is a query and a key that
// it sees. A head has T²/2 pairs, and the cost of a rung is its work per pair.
#pragma once

#include <optional>

#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "extensions/hopper/kernels/hopper_attention_backward.cuh"
#include "kernels/attention/attention.cuh"
#include "test/attention_reference.h"

namespace ladder {

// A tensor (B, NH, T, T), many times as large as all others together. It is allocated when a rung first asks for it, so
// that rungs without it can run with long sequences.
class Matrices {
 public:
  explicit Matrices(size_t count) : count_(count) {}

  float* data() {
    if (!buffer_) buffer_.emplace(count_);
    return *buffer_;
  }
  void poison() {
    if (buffer_) buffer_->poison();
  }

 private:
  size_t count_;
  std::optional<Buffer<float>> buffer_;
};

template <class T>
struct Attention {
  // Head sizes that are padded; partial tiles; one row more than the largest block; and 17, for which neither packs nor
  // tensor cores can be used.
  static std::vector<Shape> checked_shapes() {
    if (!large_shapes) return {shape(1, 3, 1, 17), shape(1, 6, 2, 24)};
    return {shape(2, 37, 3, 17), shape(1, 70, 2, 40), shape(1, 129, 2, 64), shape(1, 65, 1, 128)};
  }
  static Shape counted_shape() { return shape(1, 256, 2, 64); }
  static Shape timed_shape() { return shape(16, 1024, 12, 64); }

  explicit Attention(const Shape& shape)
      : batch(at_most(most_blocks_along_y, shape, "batch")), seq_len(at_most(most_warps, shape, "seq_len")),
        heads(at_most(most_blocks_along_y, shape, "heads")), head_size(at_most(128, shape, "head_size")),
        scale(1.0f / std::sqrt(float(head_size))), qkv(3 * out_count()) {}

  size_t out_count() const { return size_t(batch) * seq_len * heads * head_size; }
  size_t lse_count() const { return size_t(batch) * heads * seq_len; }
  size_t matrix_count() const { return lse_count() * seq_len; }  // of a tensor (B, NH, T, T)
  double elements() const { return double(out_count()); }
  double product_flops() const { return double(matrix_count()) * head_size; }  // of one product, the causal half of 2

  dim3 grid(int blocks) const { return dim3(blocks, heads, batch); }
  AttentionSizes sizes() const { return square_attention(batch, seq_len, heads, head_size); }

  // Where the rows of all heads lie, for the kernels of kernels/.
  template <class Float>
  Heads<Float> heads_in(Float* tensor) const { return packed_heads(tensor, seq_len, heads * head_size); }
  template <class Float>
  QkvHeads<Float> qkv_heads_in(Float* tensor) const { return packed_qkv(tensor, seq_len, heads * head_size); }

  AttentionReference reference(const std::vector<double>& dout) const {
    return attention_reference(qkv.numbers(), dout, sizes());
  }
  double sum_error() const { return attention_sum_error(seq_len, head_size); }

  int batch, seq_len, heads, head_size;
  float scale;
  RandomBuffer<T> qkv;

 private:
  static Shape shape(int batch, int seq_len, int heads, int head_size) {
    return {{"batch", batch}, {"seq_len", seq_len}, {"heads", heads}, {"head_size", head_size}};
  }
};

template <template <class> class Operation, class T>
bool suits_tensor_cores(const Operation<T>& o) {
  return sizeof(T) == 2 && flash_attention_fits(o.head_size, o.head_size);
}

template <template <class> class Operation, class T>
bool suits_hopper(const Operation<T>& o) {
  return has_wgmma() && suits_tensor_cores(o);
}

template <template <class> class Operation, class T>
bool suits_library(const Operation<T>& o) {
  const AttentionSizes sizes = square_attention(o.batch, o.seq_len, o.heads, o.head_size);
  return plan_attention<T>(sizes, packed_strides(o.seq_len, sizes.channels())).empty();
}

// An output whose element i may be off by `tolerance` times the sum of its terms' sizes, terms[i]
// (test/attention_reference.h).
inline Output in_terms(const char* name, std::vector<double> actual, std::vector<double> expected,
                       const std::vector<double>& terms, double tolerance) {
  for (size_t i = 0; i < terms.size(); ++i) {
    actual[i] /= terms[i];
    expected[i] /= terms[i];
  }
  return {name, std::move(actual), std::move(expected), 1, tolerance};
}

// ---- where a block's head lies

// The rows (T, HS) of this block's head in part `part` of a tensor (B, T, parts, NH, HS).
template <class Float>
__device__ inline HeadRows<Float> head_rows(Float* tensor, int parts, int part, int seq_len, int head_size) {
  const int channels = gridDim.y * head_size, stride = parts * channels;
  const size_t first_row = size_t(blockIdx.z) * seq_len;
  return {tensor + first_row * stride + part * channels + blockIdx.y * head_size, stride, seq_len, head_size};
}

template <class Float>
__device__ inline QkvRows<const Float> qkv_rows(const Float* qkv, int seq_len, int head_size) {
  return {head_rows(qkv, 3, 0, seq_len, head_size), head_rows(qkv, 3, 1, seq_len, head_size),
          head_rows(qkv, 3, 2, seq_len, head_size)};
}

// ---- one block per row of a T×T matrix

constexpr int row_threads = 64;

// This block's row in a tensor (B, NH, T, T).
template <class Float>
__device__ inline Float* matrix_row(Float* matrices, int seq_len, int row) {
  return matrices + ((size_t(blockIdx.z) * gridDim.y + blockIdx.y) * seq_len + row) * seq_len;
}

// row[j] = factor · x·rows[j] for j < count: one thread per product, which it computes alone.
template <class T>
__device__ inline void dot_rows(float* row, int count, const T* x, const HeadRows<const T>& rows, float factor) {
  for (int j = threadIdx.x; j < count; j += blockDim.x) {
    const T* y = rows[j];
    float sum = 0;
    for (int d = 0; d < rows.head_size; ++d) sum += to_float(x[d]) * to_float(y[d]);
    row[j] = factor * sum;
  }
}

// to = factor · Σ_j row[j]·rows[j] for j < count: one thread per element.
template <class T>
__device__ inline void sum_rows(T* to, const float* row, int count, const HeadRows<const T>& rows, float factor) {
  for (int d = threadIdx.x; d < rows.head_size; d += blockDim.x) {
    float sum = 0;
    for (int j = 0; j < count; ++j) sum += row[j] * to_float(rows[j][d]);
    to[d] = from_float<T>(factor * sum);
  }
}

// ---- one warp per row of a head: lane l has elements l, l + 32, ...

constexpr int warps_per_block = 4;

inline int warp_blocks(int rows) { return ceil_div(rows, warps_per_block); }

// The row of this warp.
__device__ inline int warp_row() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }

template <int N, class T>
__device__ inline void load_lane(float (&x)[N], const T* row, int head_size) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int d = threadIdx.x % 32 + 32 * i;
    x[i] = d < head_size ? to_float(row[d]) : 0.0f;
  }
}

template <int N, class T>
__device__ inline void store_lane(T* row, const float (&x)[N], int head_size, float factor) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int d = threadIdx.x % 32 + 32 * i;
    if (d < head_size) row[d] = from_float<T>(factor * x[i]);
  }
}

// x·y, for every lane.
template <int N>
__device__ inline float warp_dot(const float (&x)[N], const float (&y)[N]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += x[i] * y[i];
  return warp_reduce_sum(sum);
}

// sum += factor·x
template <int N>
__device__ inline void add_lane(float (&sum)[N], float factor, const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] += factor * x[i];
}

// Calls function(integral_constant N) for the elements that a lane has of a head.
template <class Function>
void with_lane_elements(int head_size, Function function) {
  with_compiled_head_size(head_size, [&](auto size) {
    function(std::integral_constant<int, decltype(size)::value / 32>{});
  });
}

// ---- the tiled kernels of kernels/attention/attention.cuh

// Calls function(integral_constant HS, integral_constant N). For 16 bits the model compiles these kernels with packs of
// one element only, for the few head sizes that tensor cores can't do. Here they have larger packs, to show the gain by
// tiles alone.
template <class T, class Function>
void with_tile_sizes(int head_size, Function function) {
  with_compiled_head_size(head_size, [&](auto size) {
    with_pack<T>(head_size, [&](auto width) { function(size, width); });
  });
}

}  // namespace ladder
