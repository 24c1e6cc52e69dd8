// Attention while text is generated: one query per sample, over the keys and values of all tokens so far, from a cache.
// So a new token costs the computation of one row, not of its whole context.
//
//   s_j = q·k_j/√HS,  o = Σ_j softmax(s)_j·v_j      over the keys j of positions 0 to n−1
//
// One query alone would keep one block busy. So the keys are split: a block computes o and the log-sum-exp of the
// scores over decode_keys keys of one head, and a second kernel merges the results of a head's blocks (Dao et al.,
// Flash-Decoding, 2023): with l_i the log-sum-exp of part i, o = Σ_i e^(l_i − l)·o_i, l = log Σ_i e^(l_i). In a block,
// a thread computes the scores of some keys; then groups of threads add up p_j·v_j, a group for some of the keys and a
// thread for a pack of the head's elements, and the groups' sums are added in order. No sum depends on timing.
//
// Ranks may share the keys, or the heads (extensions/generation/text_cache.cuh). Then the parts of all ranks are merged in the same
// way. A part is (B,NH,HS+1) floats: o_i and l_i of each head. Without keys o_i is 0 and l_i is −∞, so that the part
// has no weight.
//
// Cache: keys and values (B,NH,P,HS) each, P tokens in any order, so that a block reads neighbouring bytes. Moves
// 2·B·n·NH·HS elements: all keys and values, once.
#pragma once

#include "kernels/attention/attention_shape.h"
#include "kernels/device/common.cuh"

constexpr int decode_keys = 128, decode_threads = 32;  // of a block
constexpr int most_head_size = 128;
// A block's groups of threads have one sum each for every element of the head.
template <int N>
constexpr int most_group_sums = decode_threads * N > most_head_size ? decode_threads * N : most_head_size;

// A layer's cache.
template <class Float>
struct KeyValueCache {
  Float *keys = nullptr, *values = nullptr;    // (B,NH,P,HS) each
  int heads = 0, head_size = 0, positions = 0;  // NH, HS, P
  int first_head = 0, all_heads = heads;        // the NH heads among those that attention has
};

template <class Float, int N>
__global__ void append_to_cache_kernel(KeyValueCache<Float> cache, Heads<const Float> k, Heads<const Float> v, size_t packs,
                                       int rows, int first) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const int packs_per_row = cache.heads * cache.head_size / N, column = int(i % packs_per_row) * N;
  const size_t sample = i / packs_per_row / rows, row = i / packs_per_row % rows;
  const size_t place = (sample * cache.heads + column / cache.head_size) * cache.positions + first + row;
  const size_t to = place * cache.head_size + column % cache.head_size;
  float x[N];
  load(k.data + sample * k.strides.sample + row * k.strides.row + column, x);
  store(cache.keys + to, x);
  load(v.data + sample * v.strides.sample + row * v.strides.row + column, x);
  store(cache.values + to, x);
}

// The keys and values of the first `rows` rows of each sample become numbers first, first + 1, ... of the cache.
template <class Float>
void append_to_cache(const KeyValueCache<Float>& cache, const QkvHeads<const Float>& qkv, int batch, int rows, int first,
                     cudaStream_t stream) {
  const size_t count = size_t(batch) * rows * cache.heads * cache.head_size;
  KernelRange range("append_to_cache", stream, {4.0 * sizeof(Float) * count, 0});
  with_pack<Float>(cache.head_size, [&](auto N) {
    append_to_cache_kernel<Float, N>
        <<<pack_blocks(count / N), pack_block, 0, stream>>>(cache, qkv.k, qkv.v, count / N, rows, first);
  });
}

// Block (part, head, sample): parts (count,B,NH,HS+1), each over keys [part·decode_keys, ...).
template <class Float, int N>
__global__ void __launch_bounds__(decode_threads)
decode_attention_kernel(float* parts, const Float* qkv, KeyValueCache<Float> cache, int keys, float scale) {
  constexpr int own_keys = decode_keys / decode_threads;  // of a thread
  __shared__ float maxima[decode_threads], partial_sums[decode_threads], probabilities[decode_keys];
  alignas(128) __shared__ float sums[most_group_sums<N>];
  const int heads = gridDim.y, head = blockIdx.y, sample = blockIdx.z, head_size = cache.head_size;
  const int first = blockIdx.x * decode_keys, count = min(decode_keys, keys - first), thread = threadIdx.x;
  const Float* q = qkv + (size_t(sample) * 3 * cache.all_heads + cache.first_head + head) * head_size;
  const size_t rows = ((size_t(sample) * heads + head) * cache.positions + first) * head_size;
  const Float *k = cache.keys + rows, *v = cache.values + rows;

  float scores[own_keys], maximum = -INFINITY, sum = 0;
#pragma unroll
  for (int own = 0; own < own_keys; ++own) {
    const int j = own * decode_threads + thread;
    float terms[N] = {}, x[N], y[N], score = 0;
    for (int d = 0; j < count && d < head_size; d += N) {
      load(q + d, x);
      load(k + size_t(j) * head_size + d, y);
#pragma unroll
      for (int i = 0; i < N; ++i) terms[i] += x[i] * y[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) score += terms[i];
    scores[own] = j < count ? score * scale : -INFINITY;
    maximum = fmaxf(maximum, scores[own]);
  }
  maxima[thread] = maximum;
  __syncthreads();
  for (int i = 0; i < decode_threads; ++i) maximum = fmaxf(maximum, maxima[i]);
#pragma unroll
  for (int own = 0; own < own_keys; ++own) {
    const float probability = expf(scores[own] - maximum);  // 0 beyond the last key
    probabilities[own * decode_threads + thread] = probability;
    sum += probability;
  }
  partial_sums[thread] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < decode_threads; ++i) sum += partial_sums[i];

  const int packs = head_size / N, groups = max(1, decode_threads / packs);
  for (int i = thread; i < packs * groups; i += decode_threads) {
    const int group = i / packs, column = i % packs * N;
    float o[N] = {}, x[N];
    for (int j = group; j < count; j += groups) {
      load(v + size_t(j) * head_size + column, x);
#pragma unroll
      for (int c = 0; c < N; ++c) o[c] += probabilities[j] * x[c];
    }
    store(sums + group * head_size + column, o);
  }
  __syncthreads();
  float* const part = parts + ((size_t(blockIdx.x) * gridDim.z + sample) * heads + head) * (head_size + 1);
  for (int d = thread; d < head_size; d += decode_threads) {
    float total = 0;
    for (int group = 0; group < groups; ++group) total += sums[group * head_size + d];
    part[d] = total / sum;
  }
  if (thread == 0) part[head_size] = maximum + logf(sum);
}

// Block (head, sample), a thread for each element of the head. out is (B,all heads,HS), or a part if `is_part`. The
// parts are of `heads` heads from first_head on: the others have no keys.
template <bool is_part, class Float>
__global__ void merge_attention_kernel(Float* out, const float* parts, int count, int heads, int first_head, int head_size) {
  const int head = int(blockIdx.x) - first_head, sample = blockIdx.y, d = threadIdx.x;
  const size_t stride = size_t(gridDim.y) * heads * (head_size + 1);  // from part to part
  parts += (int64_t(sample) * heads + head) * (head_size + 1);
  if (head < 0 || head >= heads) count = 0;
  float maximum = -INFINITY, sum = 0, o = 0;
  for (int part = 0; part < count; ++part) maximum = fmaxf(maximum, parts[part * stride + head_size]);
  for (int part = 0; part < count; ++part) {
    const float weight = expf(parts[part * stride + head_size] - maximum);
    sum += weight;
    o += weight * parts[part * stride + d];
  }
  out += (size_t(sample) * gridDim.x + blockIdx.x) * (head_size + is_part);
  out[d] = from_float<Float>(sum == 0 ? 0 : o / sum);
  if (is_part && d == 0) out[head_size] = from_float<Float>(maximum + logf(sum));
}

// out (B,heads,HS) from `count` parts, one after another.
template <class Float>
void merge_attention(Float* out, const float* parts, int count, int batch, int heads, int head_size, cudaStream_t stream) {
  const double elements = double(batch) * heads * head_size;
  const BytesAndFlops counts = {elements * (count * sizeof(float) + sizeof(Float)), 2 * count * elements};
  KernelRange range("merge_attention", stream, counts, {{out, size_t(elements)}});
  merge_attention_kernel<false><<<dim3(heads, batch), head_size, 0, stream>>>(out, parts, count, heads, 0, head_size);
}

// Floats of a part; and of the workspace for a cache of `positions` positions.
inline size_t attention_part(int batch, int heads, int head_size) { return size_t(batch) * heads * (head_size + 1); }
inline size_t decode_workspace(int batch, int positions, int heads, int head_size) {
  return ceil_div(positions, decode_keys) * attention_part(batch, heads, head_size);
}

// out (B,c), or a part if `is_part`, from the queries of qkv (B,3c) and the first `keys` keys of the cache. c counts
// all heads. head_size is at most most_head_size.
template <class Float, bool is_part = false>
void decode_attention(std::conditional_t<is_part, float, Float>* out, const Float* qkv,
                      const KeyValueCache<Float>& cache, int batch, int keys, float* workspace, cudaStream_t stream) {
  const int heads = cache.heads, head_size = cache.head_size, count = ceil_div(keys, decode_keys);
  const double read = 2.0 * batch * keys * heads * head_size;
  KernelRange range("decode_attention", stream, {read * sizeof(Float), 2 * read},
                    {{out, size_t(batch) * cache.all_heads * (head_size + is_part)}});
  const float scale = 1.0f / sqrtf(float(head_size));
  with_pack<Float>(head_size, [&](auto N) {
    if (count > 0)
      decode_attention_kernel<Float, N><<<dim3(count, heads, batch), decode_threads, 0, stream>>>(workspace, qkv, cache, keys,
                                                                                             scale);
  });
  merge_attention_kernel<is_part><<<dim3(cache.all_heads, batch), head_size, 0, stream>>>(out, workspace, count, heads,
                                                                                  cache.first_head, head_size);
}
