// The shape of attention (kernels/attention/attention.cuh): the numbers of queries and keys, which keys a query sees,
// and where in memory the rows of all heads lie. Queries may be fewer or more than keys.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <compare>
#include <cstdint>

// A query sees keys 0 to last_key(query): all keys, or (causal) those up to its own position. `past` keys come before
// query 0, so query i stands at position past + i. It is 0 in training, and in a ring of ranks, whose causal piece is
// square; with a cache of keys it is the number of keys in the cache before these queries. That costs nothing: kernels
// compute the last key once for each of their queries, and compare with it as they would with the query.
struct AttentionSizes {
  int batch, queries, keys, heads, head_size;  // 1 or more
  bool causal = true;
  int past = 0;

  // Query i sees no key after diagonal() + i.
  __host__ __device__ int diagonal() const { return causal ? past : keys; }

  __host__ __device__ int last_key(int query) const {
    const int key = diagonal() + query;
    return key < keys ? key : keys - 1;
  }

  // The first query that sees this key. It is `queries` or more if no query does.
  __host__ __device__ int first_query(int key) const {
    const int query = key - diagonal();
    return query > 0 ? query : 0;
  }

  int channels() const { return heads * head_size; }

  // Scores are multiplied by this number.
  float scale() const { return 1.0f / sqrtf(float(head_size)); }

  // The number of pairs (a query, a key that it sees) in one head. The diagonal counts as a line without width: of a
  // square, exactly one half is seen.
  double pairs() const {
    if (!causal) return double(queries) * keys;
    const double short_rows = std::clamp(keys - past, 0, queries);  // of the queries that do not see all keys
    return short_rows * (past + short_rows / 2) + (queries - short_rows) * keys;
  }

  auto operator<=>(const AttentionSizes&) const = default;
};

// Causal self-attention of a micro-batch.
inline AttentionSizes square_attention(int batch, int seq_len, int heads, int head_size) {
  return {batch, seq_len, seq_len, heads, head_size};
}

// Memory that a library works in. If it needs more, it allocates its own.
struct LibraryWorkspace {
  void* data = nullptr;
  size_t bytes = 0;
};

template <class Float>
class AttentionKernels;  // kernels/attention/attention_kernels.cuh

// Who computes attention, besides the kernels of kernels/attention/attention.cuh. A library that has planned these sizes comes first.
template <class Float>
struct AttentionBody {
  AttentionKernels<Float>* kernels = nullptr;  // a room's
  LibraryWorkspace library = {};
};

struct HeadStrides {
  int row;         // elements from row to row
  int64_t sample;  // elements from sample to sample
  auto operator<=>(const HeadStrides&) const = default;
};

// The rows of all heads: row r of head h in sample b begins at data + b·strides.sample + r·strides.row + h·head_size.
template <class T>
struct Heads {
  T* data;
  HeadStrides strides;
  bool operator==(const Heads&) const = default;
};

template <class T>
struct QkvHeads {
  Heads<T> q, k, v;
  bool operator==(const QkvHeads&) const = default;
};

// The heads in a tensor (B, T, NH, HS), and those in a tensor (B, T, 3, NH, HS).
template <class T>
Heads<T> packed_heads(T* tensor, int seq_len, int channels) {
  return {tensor, {channels, int64_t(seq_len) * channels}};
}

template <class T>
QkvHeads<T> packed_qkv(T* qkv, int seq_len, int channels) {
  const HeadStrides strides{3 * channels, int64_t(seq_len) * 3 * channels};
  return {{qkv, strides}, {qkv + channels, strides}, {qkv + 2 * channels, strides}};
}

// The strides that a library plans for. The gradient of a tensor has the strides of that tensor.
struct AttentionStrides {
  HeadStrides q, k, v, out;
  auto operator<=>(const AttentionStrides&) const = default;
};

inline AttentionStrides packed_strides(int seq_len, int channels) {
  const HeadStrides out{channels, int64_t(seq_len) * channels}, qkv{3 * out.row, 3 * out.sample};
  return {qkv, qkv, qkv, out};
}

template <class T, class Other>
AttentionStrides strides_of(const QkvHeads<T>& qkv, const Heads<Other>& out) {
  return {qkv.q.strides, qkv.k.strides, qkv.v.strides, out.strides};
}
