// Attention while text is generated: one query a sample, over the keys and values of all tokens so far, which lie in a
// cache. So a token costs what one row costs, and not what its whole context costs.
//
//   s_j = q·k_j/√HS,  o = Σ_j softmax(s)_j·v_j      over the keys j of positions 0 to n−1
//
// One query alone would keep one block busy. So the keys are split: a block computes o and the log-sum-exp of the scores
// over decode_keys keys of one head, and a second kernel merges what the blocks of a head have found
// (Dao et al., Flash-Decoding, 2023): with l_i the log-sum-exp of part i, o = Σ_i e^(l_i − l)·o_i, l = log Σ_i e^(l_i).
// In a block, a thread computes the scores of some keys; then groups of threads add up p_j·v_j, a group for some of the keys
// and a thread for a pack of the head's elements, and the groups' sums are added in order. No sum depends on timing.
//
// Cache: keys and values (B,NH,P,HS) each, P positions, so that a block reads neighbouring bytes. Moves 2·B·n·NH·HS elements:
// all keys and values, once.
#pragma once

#include "kernels/device/common.cuh"

constexpr int decode_keys = 128, decode_threads = 32;  // of a block
constexpr int most_head_size = 128;
// A block's groups of threads have one sum each for every element of the head.
template <int N>
constexpr int most_group_sums = decode_threads * N > most_head_size ? decode_threads * N : most_head_size;

// A layer's cache.
template <class Float>
struct KeyValueCache {
  Float *keys = nullptr, *values = nullptr;  // (B,NH,P,HS) each
  int positions = 0;                         // P
};

template <class Float, int N>
__global__ void append_to_cache_kernel(KeyValueCache<Float> cache, const Float* qkv, size_t packs, int seq_len, int heads,
                                       int head_size, int first_position) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const int channels = heads * head_size, packs_per_row = channels / N;
  const int row = int(i / packs_per_row), column = int(i % packs_per_row) * N;
  const int sample = row / seq_len, position = first_position + row % seq_len, head = column / head_size;
  const size_t to = ((size_t(sample) * heads + head) * cache.positions + position) * head_size + column % head_size;
  const Float* from = qkv + size_t(row) * 3 * channels + column;
  float x[N];
  load(from + channels, x);
  store(cache.keys + to, x);
  load(from + 2 * channels, x);
  store(cache.values + to, x);
}

// The keys and values of qkv (B,T,3·NH·HS) become those of positions [first_position, first_position + T) of the cache.
template <class Float>
void append_to_cache(const KeyValueCache<Float>& cache, const Float* qkv, int batch, int seq_len, int heads, int head_size,
                     int first_position, cudaStream_t stream) {
  const size_t count = size_t(batch) * seq_len * heads * head_size;
  KernelRange range("append_to_cache", stream, 4.0 * sizeof(Float) * count, 0);
  with_pack<Float>(head_size, [&](auto width) {
    constexpr int N = decltype(width)::value;
    append_to_cache_kernel<Float, N><<<unsigned(ceil_div(count / N, size_t(256))), 256, 0, stream>>>(
        cache, qkv, count / N, seq_len, heads, head_size, first_position);
  });
  CUDA_CHECK(cudaGetLastError());
}

// Block (part, head, sample): parts (B,NH,parts,HS) and log_sums (B,NH,parts) over keys [part·decode_keys, ...).
template <class Float, int N>
__global__ void __launch_bounds__(decode_threads)
decode_attention_kernel(float* parts, float* log_sums, const Float* qkv, KeyValueCache<Float> cache, int keys, int head_size,
                        float scale) {
  constexpr int own_keys = decode_keys / decode_threads;  // of a thread
  __shared__ float maxima[decode_threads], partial_sums[decode_threads], probabilities[decode_keys];
  alignas(64) __shared__ float sums[most_group_sums<N>];
  const int heads = gridDim.y, head = blockIdx.y, sample = blockIdx.z, channels = heads * head_size;
  const int first = blockIdx.x * decode_keys, count = min(decode_keys, keys - first), thread = threadIdx.x;
  const Float* q = qkv + size_t(sample) * 3 * channels + head * head_size;
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
  const size_t part = (size_t(sample) * heads + head) * gridDim.x + blockIdx.x;
  for (int d = thread; d < head_size; d += decode_threads) {
    float total = 0;
    for (int group = 0; group < groups; ++group) total += sums[group * head_size + d];
    parts[part * head_size + d] = total / sum;
  }
  if (thread == 0) log_sums[part] = maximum + logf(sum);
}

// Block (head, sample), a thread for each element of the head.
template <class Float>
__global__ void merge_attention_kernel(Float* out, const float* parts, const float* log_sums, int count, int head_size) {
  const int heads = gridDim.x, head = blockIdx.x, sample = blockIdx.y;
  const size_t first = (size_t(sample) * heads + head) * count;
  float maximum = -INFINITY, sum = 0, o = 0;
  for (int part = 0; part < count; ++part) maximum = fmaxf(maximum, log_sums[first + part]);
  for (int part = 0; part < count; ++part) {
    const float weight = expf(log_sums[first + part] - maximum);
    sum += weight;
    o += weight * parts[(first + part) * head_size + threadIdx.x];
  }
  out[(size_t(sample) * heads + head) * head_size + threadIdx.x] = from_float<Float>(o / sum);
}

// Floats of workspace that decode_attention needs for a cache of so many positions.
inline size_t decode_workspace(int batch, int positions, int heads, int head_size) {
  return size_t(batch) * heads * ceil_div(positions, decode_keys) * (head_size + 1);
}

// out (B,c) from the queries of qkv (B,3c) and the first `keys` positions of the cache. head_size is at most most_head_size.
template <class Float>
void decode_attention(Float* out, const Float* qkv, const KeyValueCache<Float>& cache, int batch, int keys, int heads,
                      int head_size, float* workspace, cudaStream_t stream) {
  const double read = 2.0 * batch * keys * heads * head_size;
  KernelRange range("decode_attention", stream, read * sizeof(Float), 2 * read);
  range.writes(out, size_t(batch) * heads * head_size);
  const int count = ceil_div(keys, decode_keys);
  float* const log_sums = workspace + size_t(batch) * heads * count * head_size;
  const float scale = 1.0f / sqrtf(float(head_size));
  with_pack<Float>(head_size, [&](auto width) {
    constexpr int N = decltype(width)::value;
    decode_attention_kernel<Float, N><<<dim3(count, heads, batch), decode_threads, 0, stream>>>(workspace, log_sums, qkv, cache,
                                                                                           keys, head_size, scale);
  });
  merge_attention_kernel<<<dim3(heads, batch), head_size, 0, stream>>>(out, workspace, log_sums, count, head_size);
  CUDA_CHECK(cudaGetLastError());
}
