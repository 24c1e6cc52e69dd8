// Attention with an online softmax: no matrix of queries × keys is ever stored.
//
//   S = scale·Q·Kᵀ (keys that the query sees), P = softmax(S), O = P·V,   scale = 1/√HS
//   forward (Milakov, Gimelshein, arXiv:1805.02867; Dao et al., FlashAttention, arXiv:2205.14135): keys come in tiles;
//   when the running maximum m rises, the running sums l and O are rescaled. Kept for backward: lse = m + log l.
//   backward: P = exp(S − lse) again, D = Σ_d dO·O, dP = dO·Vᵀ, dS = P·(dP − D),
//             dQ = scale·dS·K,  dK = scale·dSᵀ·Q,  dV = Pᵀ·dO
//
// The model's attention is causal and square: T queries and T keys of packed tensors, qkv (B, T, 3, NH, HS) and output
// (B, T, NH, HS). The kernels do any rectangle, with any strides of its rows (kernels/attention/attention_shape.h); lse
// and D are (B, NH, queries). Keys can be processed in parts: with weights exp(lse of the part − lse of all), the
// outputs of the parts add up to the output; with the out and lse of all, their gradients add up to the gradients.
//
// One thread owns one query (forward, dQ) or one key (dK, dV). Its row and its sums stay in registers, and no sum is
// shared by two threads, so the result never depends on timing. A block has 64 such threads. They share tiles of the
// other side (keys and values for queries, queries and dO for keys). A tile is stored transposed where a thread's loop
// runs over the rows of the tile ("for j: s[j] += q[d]·k[d][j]": neighbouring words, which a CPU computes as a vector),
// and straight where it runs over the elements of the head.
// HS is compiled for 32, 64 and 128; other head sizes are padded with zeros inside the block.
// Moves 4·B·T·C elements forward (q, k, v, o) and 8 backward; tiles that are read again mostly come from cache.
// FLOPs 4·C forward for each pair of a query and a key that it sees, so 2·B·T²·C if causal and square; 7/2 of that
// backward (S and dP are computed for dQ and again for dK, dV).
//
// The launchers at the end choose between four implementations. They take the first that can do the shape and type:
//   1. a library's attention, for shapes that plan_attention() has prepared (kernels/attention/library_attention.h)
//   2. a room's kernels (kernels/attention/attention_kernels.cuh), if the body has some
//   3. kernels/attention/flash_attention.cuh, where there are tensor cores and the storage type has 16 bits
//   4. the kernels below
// The library may need a workspace for the planned shapes: take_library_attention_workspace_bytes() says how large. Its
// backward pass, and a room's, compute S and dP only once: 5/2 of the FLOPs of forward.
#pragma once

#include <climits>
#include <numeric>
#include <string>

#include "kernels/attention/attention_kernels.cuh"
#include "kernels/attention/attention_shape.h"
#include "kernels/attention/flash_attention.cuh"
#include "kernels/attention/library_attention.h"
#include "kernels/device/common.cuh"

constexpr int attention_rows = 64;  // queries or keys per block, one per thread

template <int HS>
constexpr int attention_tile = HS <= 64 ? 32 : 16;  // rows of the other side per tile; at most 33 KB of shared memory

// x[d] = factor · row[d] for d < head_size, 0 for the others.
template <int HS, int N, class Float>
__device__ inline void load_head(float (&x)[HS], const Float* row, int head_size, float factor) {
#pragma unroll
  for (int d = 0; d < HS; d += N) {
    float pack[N] = {};
    if (d < head_size) load(row + d, pack);
#pragma unroll
    for (int k = 0; k < N; ++k) x[d + k] = factor * pack[k];
  }
}

// N is the pack width of the storage type; gradients in fp32 take more than one pack for as many elements. seen: is shown
// the stored numbers (kernels/device/maximum.cuh)
template <int HS, int N, class Float, class Seen>
__device__ inline void store_head(Float* row, const float (&x)[HS], int head_size, float factor, Seen seen) {
  constexpr int W = N < pack_width<Float> ? N : pack_width<Float>;
#pragma unroll
  for (int d = 0; d < HS; d += W) {
    float pack[W];
#pragma unroll
    for (int k = 0; k < W; ++k) pack[k] = factor * x[d + k];
    if (d >= head_size) continue;
    store(row + d, pack);
    seen.see(pack);
  }
  seen.raise();
}

// The block copies rows [first, first + J) of a head to shared memory, as straight[j][d] or transposed[d][j] or both
// (null: not wanted). Rows after the head's last become zero. Neighbouring threads store to neighbouring words in both
// (else up to 16 of them would wait for one bank of shared memory), so each is loaded on its own.
template <int HS, int J, int N, class Float>
__device__ inline void load_tile(float (*straight)[HS], float (*transposed)[J], const HeadRows<const Float>& rows,
                                 int first, float factor) {
  const auto load_scaled = [&](int j, int d, float (&x)[N]) {
    for (float& element : x) element = 0;
    if (first + j < rows.count && d < rows.head_size) load(rows[first + j] + d, x);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] *= factor;
  };
  float x[N];
  for (int i = threadIdx.x; straight && i < J * (HS / N); i += blockDim.x) {
    load_scaled(i / (HS / N), i % (HS / N) * N, x);
#pragma unroll
    for (int k = 0; k < N; ++k) straight[i / (HS / N)][i % (HS / N) * N + k] = x[k];
  }
  for (int i = threadIdx.x; transposed && i < J * (HS / N); i += blockDim.x) {
    load_scaled(i % J, i / J * N, x);
#pragma unroll
    for (int k = 0; k < N; ++k) transposed[i / J * N + k][i % J] = x[k];
  }
}

// The outer loops of the next two functions are unrolled only by 4. So x and p stay in local memory, where one cached
// load serves J or HS multiplications; in registers they would take the place of the sums (and ptxas would take minutes
// to allocate them).

// s[j] = Σ_d x[d] · tile[d][j]
template <int HS, int J>
__device__ inline void dot_tile(float (&s)[J], const float (&x)[HS], const float (*tile)[J]) {
#pragma unroll
  for (int j = 0; j < J; ++j) s[j] = 0;
#pragma unroll 4
  for (int d = 0; d < HS; ++d) {
#pragma unroll
    for (int j = 0; j < J; ++j) s[j] += x[d] * tile[d][j];
  }
}

// sum[d] += Σ_j p[j] · tile[j][d]
template <int HS, int J>
__device__ inline void add_tile(float (&sum)[HS], const float (&p)[J], const float (*tile)[HS]) {
#pragma unroll 4
  for (int j = 0; j < J; ++j) {
#pragma unroll
    for (int d = 0; d < HS; ++d) sum[d] += p[j] * tile[j][d];
  }
}

// P = exp(S − lse) is 1 at most. Where a compiler adds S up in another order than in forward, the difference of large scores
// may be more: a score of 2e8 rounds by 16. (NaN stays.)
__device__ inline float exponent(float score, float log_sum) { return score > log_sum ? 0.0f : score - log_sum; }

// On the CPU device, g++ would inline these kernels into the loop over a block's threads. There it would add up in
// another order, and forward would take longer: noinline keeps them functions. Tiles begin at a cache line, so that no
// vector is loaded from two.

template <class Float, int HS, int N, class Seen>
[[gnu::noinline]] __global__ void __launch_bounds__(attention_rows)
attention_forward_kernel(Heads<Float> out, float* lse, QkvHeads<const Float> qkv, AttentionSizes sizes, float scale, Seen seen) {
  constexpr int J = attention_tile<HS>;
  alignas(64) __shared__ float keys[HS][J], values[J][HS];
  const auto [q_rows, k_rows, v_rows] = qkv_rows(qkv, sizes);
  const int block_first = blockIdx.x * attention_rows, query = block_first + threadIdx.x, head_size = sizes.head_size;
  const bool active = query < sizes.queries;
  const int block_end = end_of_seen_keys(block_first, attention_rows, sizes);
  const int last_key = active ? sizes.last_key(query) : -1;

  float q[HS], o[HS] = {}, maximum = -INFINITY, sum = 0;
  load_head<HS, N>(q, q_rows[active ? query : 0], head_size, scale);
  for (int first = 0; first < block_end; first += J) {
    __syncthreads();  // the last tile has been used
    load_tile<HS, J, N>(nullptr, keys, k_rows, first, 1);
    load_tile<HS, J, N>(values, nullptr, v_rows, first, 1);
    __syncthreads();
    if (first > last_key) continue;

    float s[J];
    dot_tile<HS, J>(s, q, keys);
    float new_maximum = maximum;
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const float seen = first + j <= last_key ? s[j] : -INFINITY;
      new_maximum = seen > new_maximum ? seen : new_maximum;
    }
    const float correction = expf(maximum - new_maximum);
    maximum = new_maximum;
    sum *= correction;
#pragma unroll
    for (int j = 0; j < J; ++j) s[j] = first + j <= last_key ? s[j] - maximum : 0.0f;
    exp_pack(s);
#pragma unroll
    for (int j = 0; j < J; ++j) {
      s[j] = first + j <= last_key ? s[j] : 0.0f;
      sum += s[j];
    }
#pragma unroll
    for (int d = 0; d < HS; ++d) o[d] *= correction;
    add_tile<HS, J>(o, s, values);
  }
  if (!active) return;
  store_head<HS, N>(head_rows(out, sizes.queries, head_size)[query], o, head_size, 1.0f / sum, seen);
  head_statistics(lse, sizes.queries)[query] = maximum + logf(sum);
}

// Computes dQ, and D (row_dots) for the next kernel.
template <class Float, class Gradient, int HS, int N, class Seen>
[[gnu::noinline]] __global__ void __launch_bounds__(attention_rows)
attention_backward_queries_kernel(QkvHeads<Gradient> dqkv, float* row_dots, Heads<const Float> dout,
                                  Heads<const Float> out, QkvHeads<const Float> qkv, const float* lse,
                                  AttentionSizes sizes, float scale, Seen seen) {
  constexpr int J = attention_tile<HS>;
  alignas(64) __shared__ float keys[J][HS], keys_transposed[HS][J], values_transposed[HS][J];
  const auto [q_rows, k_rows, v_rows] = qkv_rows(qkv, sizes);
  const int block_first = blockIdx.x * attention_rows, query = block_first + threadIdx.x, head_size = sizes.head_size;
  const bool active = query < sizes.queries;
  const int block_end = end_of_seen_keys(block_first, attention_rows, sizes);
  const int last_key = active ? sizes.last_key(query) : -1;
  const int row = active ? query : 0;

  float q[HS], d_out[HS], dq[HS] = {}, row_dot = 0;
  load_head<HS, N>(q, head_rows(out, sizes.queries, head_size)[row], head_size, 1);
  load_head<HS, N>(d_out, head_rows(dout, sizes.queries, head_size)[row], head_size, 1);
#pragma unroll
  for (int d = 0; d < HS; ++d) row_dot += q[d] * d_out[d];
  load_head<HS, N>(q, q_rows[row], head_size, scale);
  const float log_sum = head_statistics(lse, sizes.queries)[row];
  for (int first = 0; first < block_end; first += J) {
    __syncthreads();  // the last tile has been used
    load_tile<HS, J, N>(keys, keys_transposed, k_rows, first, 1);
    load_tile<HS, J, N>(nullptr, values_transposed, v_rows, first, 1);
    __syncthreads();
    if (first > last_key) continue;

    float s[J], dp[J];
    dot_tile<HS, J>(s, q, keys_transposed);
    dot_tile<HS, J>(dp, d_out, values_transposed);
#pragma unroll
    for (int j = 0; j < J; ++j) s[j] = first + j <= last_key ? exponent(s[j], log_sum) : 0.0f;
    exp_pack(s);
#pragma unroll
    for (int j = 0; j < J; ++j) s[j] = first + j <= last_key ? s[j] * (dp[j] - row_dot) : 0.0f;
    add_tile<HS, J>(dq, s, keys);
  }
  if (!active) return;
  store_head<HS, N>(head_rows(dqkv.q, sizes.queries, head_size)[query], dq, head_size, scale, seen);
  head_statistics(row_dots, sizes.queries)[query] = row_dot;
}

// Computes dK and dV.
template <class Float, class Gradient, int HS, int N, class Seen>
[[gnu::noinline]] __global__ void __launch_bounds__(attention_rows)
attention_backward_keys_kernel(QkvHeads<Gradient> dqkv, const float* row_dots, Heads<const Float> dout,
                               QkvHeads<const Float> qkv, const float* lse, AttentionSizes sizes, float scale, Seen seen) {
  constexpr int J = attention_tile<HS>;
  alignas(64) __shared__ float queries[J][HS], queries_transposed[HS][J], d_outs[J][HS], d_outs_transposed[HS][J];
  __shared__ float log_sums[J], dots[J];
  const auto [q_rows, k_rows, v_rows] = qkv_rows(qkv, sizes);
  const HeadRows<const Float> dout_rows = head_rows(dout, sizes.queries, sizes.head_size);
  const int block_first = blockIdx.x * attention_rows, key = block_first + threadIdx.x, head_size = sizes.head_size;
  const bool active = key < sizes.keys;
  const int end = sizes.queries, first_query = active ? key - sizes.diagonal() : INT_MAX;

  float k[HS], v[HS], dk[HS] = {}, dv[HS] = {};
  load_head<HS, N>(k, k_rows[active ? key : 0], head_size, 1);
  load_head<HS, N>(v, v_rows[active ? key : 0], head_size, 1);
  for (int first = sizes.first_query(block_first); first < end; first += J) {
    __syncthreads();  // the last tile has been used
    load_tile<HS, J, N>(queries, queries_transposed, q_rows, first, scale);
    load_tile<HS, J, N>(d_outs, d_outs_transposed, dout_rows, first, 1);
    if (threadIdx.x < J && first + int(threadIdx.x) < end) {
      log_sums[threadIdx.x] = head_statistics(lse, end)[first + threadIdx.x];
      dots[threadIdx.x] = head_statistics(row_dots, end)[first + threadIdx.x];
    }
    __syncthreads();
    if (first + J <= first_query) continue;

    float s[J], dp[J];
    dot_tile<HS, J>(s, k, queries_transposed);
    dot_tile<HS, J>(dp, v, d_outs_transposed);
#pragma unroll
    for (int i = 0; i < J; ++i) s[i] = first_query <= first + i && first + i < end ? exponent(s[i], log_sums[i]) : 0.0f;
    exp_pack(s);
#pragma unroll
    for (int i = 0; i < J; ++i) {
      const bool sees_key = first_query <= first + i && first + i < end;
      s[i] = sees_key ? s[i] : 0.0f;
      dp[i] = sees_key ? s[i] * (dp[i] - dots[i]) : 0.0f;
    }
    add_tile<HS, J>(dv, s, d_outs);
    add_tile<HS, J>(dk, dp, queries);
  }
  if (!active) return;
  store_head<HS, N>(head_rows(dqkv.k, sizes.keys, head_size)[key], dk, head_size, 1, seen);
  store_head<HS, N>(head_rows(dqkv.v, sizes.keys, head_size)[key], dv, head_size, 1, seen);
}

template <class Float>
constexpr bool tensor_core_type = has_tensor_cores && sizeof(Float) == 2;

// The largest number of elements of which a head's size and the places of all rows are multiples.
template <class... T>
int common_unit(int head_size, const Heads<T>&... heads) {
  int64_t unit = head_size;
  auto divide = [&](int64_t number) { unit = std::gcd(unit, number); };
  (divide(heads.strides.row), ...);
  (divide(heads.strides.sample), ...);
  (divide(reinterpret_cast<uintptr_t>(heads.data) / sizeof(T)), ...);
  return int(unit);
}

// Calls function(integral_constant HS, integral_constant N, ...) for the compiled head size that holds head_size, for packs
// of N elements (N divides `unit`), and with the argument that with_maximum<Out> passes.
template <class Float, class Out, class Function>
void with_head_size(int head_size, int unit, float* maximum, Function function) {
  if (head_size > 128)
    throw std::runtime_error("attention: head size " + std::to_string(head_size) + " is over 128");
  auto with_others = [&](auto... others) {
    if (head_size <= 32) function(std::integral_constant<int, 32>{}, others...);
    else if (head_size <= 64) function(std::integral_constant<int, 64>{}, others...);
    else function(std::integral_constant<int, 128>{}, others...);
  };
  // With tensor cores, 16-bit heads that fit packs are done by flash attention: only single elements are left.
  const auto with_single = [&](auto last) { with_others(std::integral_constant<int, 1>{}, last); };
  if constexpr (tensor_core_type<Float>) with_maximum<Out>(maximum, with_single);
  else with_pack<Float, Out>(unit, maximum, with_others);
}

// Plans attention of this shape by the library, under the current SmMargin, which takes about a second, once. Returns
// an empty string, or the reason why the library can't do it; then our own kernels do.
template <class Float>
std::string plan_attention(const AttentionSizes& sizes, const AttentionStrides& strides) {
  if constexpr (library_has_type<Float>) return plan_library_attention<Float>(sizes, strides);
  else if (has_library_attention) return library_attention_name() + " can't: it has no fp32";
  else return "this program was built without cuDNN";
}

template <class Float>
bool attention_is_planned(const AttentionSizes& sizes, const AttentionStrides& strides) {
  if constexpr (library_has_type<Float>) return library_attention_is_planned<Float>(sizes, strides);
  else return false;
}

// Tells the listener which array is written, if it is contiguous: the listener reads no rows with gaps between them.
template <class T>
void writes_heads(KernelRange& range, const Heads<T>& heads, int rows, const AttentionSizes& sizes) {
  if (heads == packed_heads(heads.data, rows, sizes.channels()))
    range.writes(heads.data, size_t(sizes.batch) * rows * sizes.channels());
}
template <class T>
void writes_heads(KernelRange& range, const QkvHeads<T>& heads, const AttentionSizes& sizes) {
  if (sizes.queries == sizes.keys && heads == packed_qkv(heads.q.data, sizes.keys, sizes.channels()))
    return range.writes(heads.q.data, 3 * size_t(sizes.batch) * sizes.keys * sizes.channels());
  writes_heads(range, heads.q, sizes.queries, sizes);
  writes_heads(range, heads.k, sizes.keys, sizes);
  writes_heads(range, heads.v, sizes.keys, sizes);
}

// Computes out and lse (B,NH,queries) from q, k and v. maximum: our own kernels store the largest |out| there, a library
// does not (kernels/device/maximum.cuh)
template <class Float>
void attention_forward(const Heads<Float>& out, float* lse, const QkvHeads<const Float>& qkv, const AttentionSizes& sizes,
                       cudaStream_t stream, const AttentionBody<Float>& body = {}, float* maximum = nullptr) {
  const double columns = double(sizes.batch) * sizes.channels(), seen = sizes.last_key(sizes.queries - 1) + 1;
  KernelRange range("attention_forward", stream,
                    {columns * 2 * (sizes.queries + seen) * sizeof(Float), 2 * columns * 2 * sizes.pairs()});
  writes_heads(range, out, sizes.queries, sizes);
  range.writes(lse, size_t(sizes.batch) * sizes.heads * sizes.queries);
  const int head_size = sizes.head_size, unit = common_unit(head_size, out, qkv.q, qkv.k, qkv.v);
  if constexpr (library_has_type<Float>)
    if (attention_is_planned<Float>(sizes, strides_of(qkv, out)))
      return library_attention_forward(out, lse, qkv, sizes, stream, body.library);
  if constexpr (sizeof(Float) == 2)
    if (body.kernels && flash_attention_fits(unit, head_size)) return body.kernels->forward(out, lse, qkv, sizes, stream, maximum);
  if constexpr (tensor_core_type<Float>)
    if (flash_attention_fits(unit, head_size)) return flash_attention_forward(out, lse, qkv, sizes, stream, maximum);
  const dim3 grid(ceil_div(sizes.queries, attention_rows), sizes.heads, sizes.batch);
  with_head_size<Float, Float>(head_size, unit, maximum, [&](auto HS, auto N, auto seen) {
    attention_forward_kernel<Float, HS, N><<<grid, attention_rows, 0, stream>>>(out, lse, qkv, sizes, sizes.scale(), seen);
  });
}

// Computes dq, dk and dv from dout and the tensors of forward: out, q, k, v, lse. row_dots (B,NH,queries): workspace.
// Gradient is Float, or float for partial gradients that are to be added up. lse and out may belong to more keys than
// these: then this is the keys' part of the gradients. maximum: as above, of dq, dk and dv together
template <class Float, class Gradient>
void attention_backward(const QkvHeads<Gradient>& dqkv, float* row_dots, const Heads<const Float>& dout,
                        const Heads<const Float>& out, const QkvHeads<const Float>& qkv, const float* lse,
                        const AttentionSizes& sizes, cudaStream_t stream, const AttentionBody<Float>& body = {}, float* maximum = nullptr) {
  constexpr bool same_type = std::is_same_v<Float, Gradient>;
  const AttentionStrides strides = strides_of(qkv, out);
  const bool planned =
      same_type && strides_of(dqkv, dout) == strides && attention_is_planned<Float>(sizes, strides);
  const int head_size = sizes.head_size;
  const int unit = common_unit(head_size, dqkv.q, dqkv.k, dqkv.v, dout, out, qkv.q, qkv.k, qkv.v);
  const bool of_a_room = sizeof(Float) == 2 && body.kernels && flash_attention_fits(unit, head_size);
  const int products = planned || of_a_room ? 5 : 7;
  const double columns = double(sizes.batch) * sizes.channels(), seen = sizes.last_key(sizes.queries - 1) + 1;
  KernelRange range("attention_backward", stream,
                    {columns * ((3.0 * sizes.queries + 2 * seen) * sizeof(Float) +
                                (sizes.queries + 2.0 * sizes.keys) * sizeof(Gradient)),
                     products * columns * 2 * sizes.pairs()});
  writes_heads(range, dqkv, sizes);
  if constexpr (library_has_type<Float> && same_type)
    if (planned) return library_attention_backward(dqkv, dout, out, qkv, lse, sizes, stream, body.library);
  if constexpr (sizeof(Float) == 2)
    if (of_a_room) {
      if constexpr (same_type) return body.kernels->backward(dqkv, row_dots, dout, out, qkv, lse, sizes, stream, maximum);
      else return body.kernels->backward_of_part(dqkv, row_dots, dout, out, qkv, lse, sizes, stream, maximum);
    }
  if constexpr (tensor_core_type<Float>)
    if (flash_attention_fits(unit, head_size))
      return flash_attention_backward(dqkv, row_dots, dout, out, qkv, lse, sizes, stream, maximum);
  const dim3 query_grid(ceil_div(sizes.queries, attention_rows), sizes.heads, sizes.batch);
  const dim3 key_grid(ceil_div(sizes.keys, attention_rows), sizes.heads, sizes.batch);
  with_head_size<Float, Gradient>(head_size, unit, maximum, [&](auto HS, auto N, auto seen) {
    attention_backward_queries_kernel<Float, Gradient, HS, N>
        <<<query_grid, attention_rows, 0, stream>>>(dqkv, row_dots, dout, out, qkv, lse, sizes, sizes.scale(), seen);
    attention_backward_keys_kernel<Float, Gradient, HS, N>
        <<<key_grid, attention_rows, 0, stream>>>(dqkv, row_dots, dout, qkv, lse, sizes, sizes.scale(), seen);
  });
}

// ---- causal self-attention of packed tensors: qkv and dqkv (B,T,3,NH,HS), out and dout (B,T,NH,HS), lse (B,NH,T)

template <class Float>
void attention_forward(Float* out, float* lse, const Float* qkv, int batch, int seq_len, int heads, int head_size,
                       cudaStream_t stream, const AttentionBody<Float>& body = {}, float* maximum = nullptr) {
  const int channels = heads * head_size;
  attention_forward(packed_heads(out, seq_len, channels), lse, packed_qkv(qkv, seq_len, channels),
                    square_attention(batch, seq_len, heads, head_size), stream, body, maximum);
}

template <class Float>
void attention_backward(Float* dqkv, float* row_dots, const Float* dout, const Float* out, const Float* qkv,
                        const float* lse, int batch, int seq_len, int heads, int head_size, cudaStream_t stream,
                        const AttentionBody<Float>& body = {}, float* maximum = nullptr) {
  const int channels = heads * head_size;
  attention_backward(packed_qkv(dqkv, seq_len, channels), row_dots, packed_heads(dout, seq_len, channels),
                     packed_heads(out, seq_len, channels), packed_qkv(qkv, seq_len, channels), lse,
                     square_attention(batch, seq_len, heads, head_size), stream, body, maximum);
}
