// Attention over keys that come in parts, from ranks in a ring (extensions/context_parallel/ring_attention.cuh): which keys of a part
// the queries see, and how the results of the parts are combined. Nothing here communicates.
//
// N ranks have two runs of each sample, an early one and a late one, of the same length (zigzag): rank r
// has the runs r and 2N−1−r. In step i it deals with the keys of rank j = r − i (mod N). Which of them do its queries
// see?
//
//      keys of rank j:   j = r             j < r             j > r
//                        early late        early late        early late
//      early queries     ◣                 ■
//      late queries      ■     ◣           ■                 ■     ■
//
// Its own keys are seen causally, of earlier ranks the first half by all queries, of later ranks all by the second half
// of the queries. In each step a head has as many pairs of a query and a key, (T/N)²/2, on every rank. Nothing is
// computed to be masked away, and no rank waits for another that has more to do.
//
// Forward. A part gives outputs p with log-sum-exps m; o and l are the results of the parts before. Together:
//   w = e^m/(e^l + e^m),   o += w·(p − o),   l = log(e^l + e^m)                 o in fp32
// Backward. With out and lse of all keys, each part gives its share of dq, and its keys' dk and dv from these queries;
// the sums over steps and ranks are the gradients. All are in fp32 until they are complete.
//
// B samples, S = T/N rows of each on this rank, R = B·S, c = NH·HS channels. Rows lie as in packed tensors. Bytes, in
// addition to the bytes of attention: pack_keys 4·R·c·w; merge_ring_part up to R·c·(w + 8); add_ring_part 30·R·c or
// 24·R·c; finish_ring_gradients R·c·(20 + 3·w).
#pragma once

#include "kernels/attention/attention.cuh"

// Step `number` of `ranks` on one rank.
struct RingStep {
  int rank, ranks, number;
  int owner() const { return (rank + ranks - number) % ranks; }  // the rank whose keys this step uses
  bool is_first() const { return number == 0; }
  bool is_last() const { return number == ranks - 1; }
};

// Queries from first_query on, and keys from the first on.
struct RingPart {
  int first_query;
  AttentionSizes sizes;
};

// own: causal attention of this rank's rows.
inline RingPart ring_part(const RingStep& step, const AttentionSizes& own) {
  RingPart part = {0, own};
  if (step.is_first()) return part;
  part.sizes.causal = false;
  if (step.owner() < step.rank) part.sizes.keys = own.keys / 2;
  else part.sizes.queries = part.first_query = own.queries / 2;
  return part;
}

template <class T>
Heads<T> rows_from(Heads<T> heads, int row) {
  heads.data += int64_t(row) * heads.strides.row;
  return heads;
}

// Where rows lie: this rank's in tensors (B,S,3,NH,HS) and (B,S,NH,HS), others' keys in (B,S,2,NH,HS).
inline AttentionStrides ring_strides(const RingStep& step, const AttentionSizes& own) {
  AttentionStrides strides = packed_strides(own.keys, own.channels());
  if (!step.is_first()) strides.k = strides.v = {2 * strides.out.row, 2 * strides.out.sample};
  return strides;
}

// The part's queries in qkv, and its keys and values, there too or in `keys`.
template <class T>
QkvHeads<T> ring_heads(const RingStep& step, T* qkv, T* keys, const AttentionSizes& own) {
  const int channels = own.channels();
  const AttentionStrides strides = ring_strides(step, own);
  QkvHeads<T> heads = packed_qkv(qkv, own.keys, channels);
  heads.q = rows_from(heads.q, ring_part(step, own).first_query);
  if (!step.is_first()) heads.k = {keys, strides.k}, heads.v = {keys + channels, strides.v};
  return heads;
}

template <class T>
Heads<T> ring_rows(const RingStep& step, T* tensor, const AttentionSizes& own) {
  return rows_from(packed_heads(tensor, own.queries, own.channels()), ring_part(step, own).first_query);
}

// keys (R,2c) = keys and values of qkv (R,3c), beside each other, as they are sent.
template <class Float>
void pack_keys(Float* keys, const Float* qkv, const AttentionSizes& own, cudaStream_t stream) {
  const size_t rows = size_t(own.batch) * own.queries, bytes = 2 * own.channels() * sizeof(Float);
  KernelRange range("pack_keys", stream, {2.0 * rows * bytes, 0}, {{keys, rows * 2 * own.channels()}});
  CUDA_CHECK(cudaMemcpy2DAsync(keys, bytes, qkv + own.channels(), bytes / 2 * 3, bytes, rows, cudaMemcpyDeviceToDevice,
                               stream));
}

// late (B,NH,S/2) = lse (B,NH,S) of the second half of the queries.
inline void copy_late_queries(float* late, const float* lse, const AttentionSizes& own, cudaStream_t stream) {
  const size_t half = own.queries / 2, bytes = half * sizeof(float), heads = size_t(own.batch) * own.heads;
  KernelRange range("copy_late_queries", stream, {2.0 * heads * bytes, 0}, {{late, heads * half}});
  CUDA_CHECK(cudaMemcpy2DAsync(late, bytes, lse + half, 2 * bytes, bytes, heads, cudaMemcpyDeviceToDevice, stream));
}

// ---- forward

// One log-sum-exp per thread. lse (heads,S), from first_query on, becomes the log-sum-exp of both; part_lse
// (heads,queries) the part's weights.
static __global__ void ring_weights_kernel(float* lse, float* part_lse, size_t count, int queries, int own_queries,
                                           int first_query) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float* const total = lse + i / queries * own_queries + first_query + i % queries;
  const float before = *total, part = part_lse[i], larger = part > before ? part : before;
  *total = larger + logf(1.0f + expf(-fabsf(part - before)));
  part_lse[i] = 1.0f / (1.0f + expf(before - part));
}

// One pack of sums (R,c) per thread. The first part initialises the sums; the last writes out, complete over all parts.
template <class Float, int N, class Seen>
__global__ void merge_ring_part_kernel(Float* out, float* sums, const float* weights, size_t packs, RingPart part,
                                       int own_queries, bool is_first, bool is_last, Seen seen) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const auto [first_query, sizes] = part;
  const int packs_per_row = sizes.heads * sizes.head_size / N;
  const int row = int(i / packs_per_row), column = int(i % packs_per_row) * N;
  const int sample = row / own_queries, query = row % own_queries - first_query, head = column / sizes.head_size;
  float sum[N] = {}, x[N];
  if (!is_first) load(sums + i * N, sum);
  if (query >= 0) {
    load(out + i * N, x);
    const float weight = is_first ? 1.0f : weights[(size_t(sample) * sizes.heads + head) * sizes.queries + query];
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] += weight * (x[k] - sum[k]);
  }
  if (is_last) store(out + i * N, sum);
  else if (query >= 0) store(sums + i * N, sum);
  seen.see(sum);
  seen.raise();
}

// out (R,c) has the part's outputs. They are merged into sums (R,c) and lse (B,NH,S); after the last part, `out` has
// the sums.
// part_lse: the part's log-sum-exps (B,NH,queries), which become its weights. maximum: of `out`, after the last part
template <class Float>
void merge_ring_part(const RingStep& step, Float* out, float* lse, float* sums, float* part_lse, const AttentionSizes& own,
                     cudaStream_t stream, float* maximum = nullptr) {
  const RingPart part = ring_part(step, own);
  const size_t count = size_t(own.batch) * own.queries * own.channels();
  const size_t part_rows = size_t(own.batch) * own.heads * part.sizes.queries, part_count = part_rows * own.head_size;
  const double once = sizeof(float), kept = step.is_first() ? 0 : once;  // bytes of sums that are written and read
  const double bytes = part_count * (sizeof(Float) + kept) +
                       (step.is_last() ? count * sizeof(Float) + (count - part_count) * once : part_count * once) +
                       (step.is_first() ? 0 : part_rows * 5 * once);
  KernelRange range("merge_ring_part", stream, {bytes, step.is_first() ? 0 : 3.0 * part_count});
  if (step.is_last()) range.writes(out, count);
  else range.writes(sums, count);
  if (!step.is_first())
    ring_weights_kernel<<<pack_blocks(part_rows), pack_block, 0, stream>>>(
        lse, part_lse, part_rows, part.sizes.queries, own.queries, part.first_query);
  with_pack<float, Float>(own.head_size, step.is_last() ? maximum : nullptr, [&](auto N, auto seen) {
    merge_ring_part_kernel<Float, N><<<pack_blocks(count / N), pack_block, 0, stream>>>(
        out, sums, part_lse, count / N, part, own.queries, step.is_first(), step.is_last(), seen);
  });
}

// One step: attention of this rank's queries with the owner's keys, merged with the steps before. After the last step,
// out (R,c) and lse (B,NH,S) are the results over all keys; before that, `out` is where parts are computed.
template <class Float>
void ring_forward(const RingStep& step, Float* out, float* lse, float* sums, float* part_lse, const Float* qkv, const Float* keys,
                  const AttentionSizes& own, cudaStream_t stream, const AttentionBody<Float>& body = {}, float* maximum = nullptr) {
  attention_forward(ring_rows(step, out, own), step.is_first() ? lse : part_lse, ring_heads(step, qkv, keys, own),
                    ring_part(step, own).sizes, stream, body);
  merge_ring_part(step, out, lse, sums, part_lse, own, stream, maximum);
}

// ---- backward

// One step: the part's gradients, in dqkv (R,3c), whose other rows stay as they are. late_lse: of copy_late_queries().
// row_dots: workspace (B,NH,S).
template <class Float>
void ring_backward(const RingStep& step, float* dqkv, float* row_dots, const Float* dout, const Float* out, const Float* qkv,
                   const Float* keys, const float* lse, const float* late_lse, const AttentionSizes& own, cudaStream_t stream,
                   const AttentionBody<Float>& body = {}) {
  const RingPart part = ring_part(step, own);
  QkvHeads<float> gradients = packed_qkv(dqkv, own.keys, own.channels());
  gradients.q = rows_from(gradients.q, part.first_query);
  attention_backward(gradients, row_dots, ring_rows(step, dout, own), ring_rows(step, out, own),
                     ring_heads(step, qkv, keys, own), part.first_query ? late_lse : lse, part.sizes, stream, body);
}

// One pack of part (R,3c) per thread.
template <int N>
__global__ void add_ring_part_kernel(float* sums, float* keys_sums, const float* part, size_t packs, int rows, int channels,
                                     int first_query, int keys, bool is_new) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const int packs_per_row = 3 * channels / N, row = int(i / packs_per_row), column = int(i % packs_per_row) * N;
  const bool of_query = column < channels, there = of_query ? row % rows >= first_query : row % rows < keys;
  if (!there && (of_query || !is_new)) return;
  float* const to = of_query ? sums + i * N : keys_sums + size_t(row) * 2 * channels + column - channels;
  float sum[N] = {}, x[N] = {};
  if (of_query || !is_new) load(to, sum);
  if (there) load(part + i * N, x);
  add(sum, x);
  store(to, sum);
}

// Adds a part (R,3c) of ring_backward to dq in sums (R,3c), and to dk and dv of the owner's keys, keys_sums (R,2c).
// These begin in step 1, with zeros for keys that no query saw.
inline void add_ring_part(const RingStep& step, float* sums, float* keys_sums, const float* part, const AttentionSizes& own,
                          cudaStream_t stream) {
  const auto [first_query, sizes] = ring_part(step, own);
  const int channels = own.channels();
  const bool is_new = step.number == 1;
  const double columns = double(own.batch) * channels, seen = columns * (sizes.queries + 2 * sizes.keys);
  const double bytes = 4 * (is_new ? seen + columns * (2.0 * sizes.queries + 2 * own.keys) : 3 * seen);
  KernelRange range("add_ring_part", stream, {bytes, seen}, {{keys_sums, size_t(own.batch) * own.keys * 2 * channels, !is_new}});
  with_pack<float>(channels, [&](auto N) {
    const size_t packs = size_t(own.batch) * own.queries * 3 * channels / N;
    add_ring_part_kernel<N><<<pack_blocks(packs), pack_block, 0, stream>>>(
        sums, keys_sums, part, packs, own.queries, channels, first_query, sizes.keys, is_new);
  });
}

// One pack of dqkv (R,3c) per thread.
template <class Float, int N, class Seen>
__global__ void finish_ring_gradients_kernel(Float* dqkv, const float* sums, const float* keys_sums, size_t packs,
                                             int channels, Seen seen) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const int packs_per_row = 3 * channels / N, row = int(i / packs_per_row), column = int(i % packs_per_row) * N;
  float sum[N], x[N] = {};
  load(sums + i * N, sum);
  if (column >= channels) load(keys_sums + size_t(row) * 2 * channels + column - channels, x);
  add(sum, x);
  store(dqkv + i * N, sum);
  seen.see(sum);
  seen.raise();
}

// dqkv (R,3c) = sums (R,3c), with keys_sums (R,2c) added to dk and dv: the gradients of this rank's keys and values
// from other ranks' queries.
template <class Float>
void finish_ring_gradients(Float* dqkv, const float* sums, const float* keys_sums, const AttentionSizes& own,
                           cudaStream_t stream, float* maximum = nullptr) {
  const int channels = own.channels();
  const size_t rows = size_t(own.batch) * own.queries;
  const BytesAndFlops counts = {rows * channels * (20.0 + 3 * sizeof(Float)), 2.0 * rows * channels};
  KernelRange range("finish_ring_gradients", stream, counts, {{dqkv, rows * 3 * channels}});
  with_pack<float, Float>(channels, maximum, [&](auto N, auto seen) {
    const size_t packs = rows * 3 * channels / N;
    finish_ring_gradients_kernel<Float, N><<<pack_blocks(packs), pack_block, 0, stream>>>(
        dqkv, sums, keys_sums, packs, channels, seen);
  });
}
