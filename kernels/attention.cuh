// Causal self-attention with an online softmax: no T×T matrix is ever stored.
//
//   S = scale·Q·Kᵀ (keys ≤ query), P = softmax(S), O = P·V,   scale = 1/√HS
//   forward (Milakov, Gimelshein, arXiv:1805.02867; Dao et al., FlashAttention, arXiv:2205.14135): keys come in tiles;
//   when the running maximum m rises, the running sums l and O are rescaled. Kept for backward: lse = m + log l.
//   backward: P = exp(S − lse) again, D = Σ_d dO·O, dP = dO·Vᵀ, dS = P·(dP − D),
//             dQ = scale·dS·K,  dK = scale·dSᵀ·Q,  dV = Pᵀ·dO
//
// Packed input qkv (B, T, 3, NH, HS), output (B, T, NH, HS), lse and D (B, NH, T).
// One thread owns one query (forward, dQ) or one key (dK, dV). Its row and its sums stay in registers, and no sum is
// shared by two threads, so the result never depends on timing. A block has 64 such threads. They share tiles of the
// other side (keys and values for queries, queries and dO for keys). A tile is stored transposed where a thread's loop
// runs over the rows of the tile ("for j: s[j] += q[d]·k[d][j]": neighbouring words, which a CPU computes as a vector),
// and straight where it runs over the elements of the head.
// HS is compiled for 32, 64 and 128; other head sizes are padded with zeros inside the block.
// Moves 4·B·T·C elements forward (q, k, v, o) and 8 backward; tiles that are read again mostly come from cache.
// FLOPs 2·B·T²·C forward (causal half of 4), 7/2 of that backward (S and dP are computed for dQ and again for dK, dV).
//
// The launchers at the end choose between three implementations. They take the first that can do the shape and type:
//   1. a library's attention, for shapes that plan_attention() has prepared: kernels/cudnn/attention.h in a GPU
//      build with cuDNN, kernels/without_cudnn/attention.h (no library) in all others (kernels/library_attention.h)
//   2. kernels/flash_attention.cuh, where there are tensor cores and the storage type has 16 bits
//   3. the kernels below
// The library may need a workspace for the planned shapes: library_attention_workspace_bytes() says how large, and
// use_library_attention_workspace() gives it one; null takes it away again. Without one it allocates its own. Its
// backward pass computes S and dP only once: 5/2 of the FLOPs of forward.
#pragma once

#include <string>

#include "kernels/device/common.cuh"
#include "kernels/flash_attention.cuh"
#include "kernels/library_attention.h"

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

template <int HS, int N, class Float>
__device__ inline void store_head(Float* row, const float (&x)[HS], int head_size, float factor) {
#pragma unroll
  for (int d = 0; d < HS; d += N) {
    float pack[N];
#pragma unroll
    for (int k = 0; k < N; ++k) pack[k] = factor * x[d + k];
    if (d < head_size) store(row + d, pack);
  }
}

// The block copies rows [first, first + J) of a head to shared memory, as straight[j][d] or transposed[d][j] or both
// (null: not wanted). Rows from seq_len on become zero. `rows` points to row 0 of the head; rows are `stride` elements
// apart.
template <int HS, int J, int N, class Float>
__device__ inline void load_tile(float (*straight)[HS], float (*transposed)[J], const Float* rows, size_t stride,
                                 int first, int seq_len, int head_size, float factor) {
  for (int i = threadIdx.x; i < J * (HS / N); i += blockDim.x) {
    const int j = i / (HS / N), d = i % (HS / N) * N;
    float x[N] = {};
    if (first + j < seq_len && d < head_size) load(rows + (first + j) * stride + d, x);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (straight) straight[j][d + k] = factor * x[k];
      if (transposed) transposed[d + k][j] = factor * x[k];
    }
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

template <class Float, int HS, int N>
__global__ void __launch_bounds__(attention_rows)
attention_forward_kernel(Float* out, float* lse, const Float* qkv, int seq_len, int head_size, float scale) {
  constexpr int J = attention_tile<HS>;
  __shared__ float keys[HS][J], values[J][HS];
  const int heads = gridDim.y, head = blockIdx.y, batch = blockIdx.z, channels = heads * head_size;
  const int block_first = blockIdx.x * attention_rows, query = block_first + threadIdx.x;
  const int block_end = min(block_first + attention_rows, seq_len);
  const size_t stride = 3 * size_t(channels);
  const Float* q_rows = qkv + size_t(batch) * seq_len * stride + head * head_size;
  const bool active = query < seq_len;

  float q[HS], o[HS] = {}, maximum = -INFINITY, sum = 0;
  load_head<HS, N>(q, q_rows + (active ? query : 0) * stride, head_size, scale);
  for (int first = 0; first < block_end; first += J) {
    __syncthreads();  // the last tile has been used
    load_tile<HS, J, N>(nullptr, keys, q_rows + channels, stride, first, seq_len, head_size, 1);
    load_tile<HS, J, N>(values, nullptr, q_rows + 2 * channels, stride, first, seq_len, head_size, 1);
    __syncthreads();
    if (!active || first > query) continue;

    float s[J];
    dot_tile<HS, J>(s, q, keys);
    float new_maximum = maximum;
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const float seen = first + j <= query ? s[j] : -INFINITY;
      new_maximum = seen > new_maximum ? seen : new_maximum;
    }
    const float correction = expf(maximum - new_maximum);
    maximum = new_maximum;
    sum *= correction;
#pragma unroll
    for (int j = 0; j < J; ++j) s[j] = first + j <= query ? s[j] - maximum : 0.0f;
    exp_pack(s);
#pragma unroll
    for (int j = 0; j < J; ++j) {
      s[j] = first + j <= query ? s[j] : 0.0f;
      sum += s[j];
    }
#pragma unroll
    for (int d = 0; d < HS; ++d) o[d] *= correction;
    add_tile<HS, J>(o, s, values);
  }
  if (!active) return;
  store_head<HS, N>(out + (size_t(batch) * seq_len + query) * channels + head * head_size, o, head_size, 1.0f / sum);
  lse[(size_t(batch) * heads + head) * seq_len + query] = maximum + logf(sum);
}

// Computes dQ, and D (row_dots) for the next kernel.
template <class Float, int HS, int N>
__global__ void __launch_bounds__(attention_rows)
attention_backward_queries_kernel(Float* dqkv, float* row_dots, const Float* dout, const Float* out,
                                  const Float* qkv, const float* lse, int seq_len, int head_size, float scale) {
  constexpr int J = attention_tile<HS>;
  __shared__ float keys[J][HS], keys_transposed[HS][J], values_transposed[HS][J];
  const int heads = gridDim.y, head = blockIdx.y, batch = blockIdx.z, channels = heads * head_size;
  const int block_first = blockIdx.x * attention_rows, query = block_first + threadIdx.x;
  const int block_end = min(block_first + attention_rows, seq_len);
  const size_t stride = 3 * size_t(channels), head_offset = size_t(batch) * seq_len * stride + head * head_size;
  const Float* q_rows = qkv + head_offset;
  const bool active = query < seq_len;
  const int row = active ? query : 0;
  const size_t out_offset = (size_t(batch) * seq_len + row) * channels + head * head_size;
  const size_t statistic = (size_t(batch) * heads + head) * seq_len + row;

  float q[HS], d_out[HS], dq[HS] = {}, row_dot = 0;
  load_head<HS, N>(q, out + out_offset, head_size, 1);
  load_head<HS, N>(d_out, dout + out_offset, head_size, 1);
#pragma unroll
  for (int d = 0; d < HS; ++d) row_dot += q[d] * d_out[d];
  load_head<HS, N>(q, q_rows + row * stride, head_size, scale);
  const float log_sum = lse[statistic];
  for (int first = 0; first < block_end; first += J) {
    __syncthreads();  // the last tile has been used
    load_tile<HS, J, N>(keys, keys_transposed, q_rows + channels, stride, first, seq_len, head_size, 1);
    load_tile<HS, J, N>(nullptr, values_transposed, q_rows + 2 * channels, stride, first, seq_len, head_size, 1);
    __syncthreads();
    if (!active || first > query) continue;

    float s[J], dp[J];
    dot_tile<HS, J>(s, q, keys_transposed);
    dot_tile<HS, J>(dp, d_out, values_transposed);
#pragma unroll
    for (int j = 0; j < J; ++j) s[j] = first + j <= query ? s[j] - log_sum : 0.0f;
    exp_pack(s);
#pragma unroll
    for (int j = 0; j < J; ++j) s[j] = first + j <= query ? s[j] * (dp[j] - row_dot) : 0.0f;
    add_tile<HS, J>(dq, s, keys);
  }
  if (!active) return;
  store_head<HS, N>(dqkv + head_offset + query * stride, dq, head_size, scale);
  row_dots[statistic] = row_dot;
}

// Computes dK and dV.
template <class Float, int HS, int N>
__global__ void __launch_bounds__(attention_rows)
attention_backward_keys_kernel(Float* dqkv, const float* row_dots, const Float* dout, const Float* qkv,
                               const float* lse, int seq_len, int head_size, float scale) {
  constexpr int J = attention_tile<HS>;
  __shared__ float queries[J][HS], queries_transposed[HS][J], d_outs[J][HS], d_outs_transposed[HS][J];
  __shared__ float log_sums[J], dots[J];
  const int heads = gridDim.y, head = blockIdx.y, batch = blockIdx.z, channels = heads * head_size;
  const int block_first = blockIdx.x * attention_rows, key = block_first + threadIdx.x;
  const size_t stride = 3 * size_t(channels), head_offset = size_t(batch) * seq_len * stride + head * head_size;
  const Float* q_rows = qkv + head_offset;
  const Float* dout_rows = dout + size_t(batch) * seq_len * channels + head * head_size;
  const size_t statistics = (size_t(batch) * heads + head) * seq_len;
  const bool active = key < seq_len;

  float k[HS], v[HS], dk[HS] = {}, dv[HS] = {};
  load_head<HS, N>(k, q_rows + channels + (active ? key : 0) * stride, head_size, 1);
  load_head<HS, N>(v, q_rows + 2 * channels + (active ? key : 0) * stride, head_size, 1);
  for (int first = block_first; first < seq_len; first += J) {
    __syncthreads();  // the last tile has been used
    load_tile<HS, J, N>(queries, queries_transposed, q_rows, stride, first, seq_len, head_size, scale);
    load_tile<HS, J, N>(d_outs, d_outs_transposed, dout_rows, channels, first, seq_len, head_size, 1);
    if (threadIdx.x < J && first + int(threadIdx.x) < seq_len) {
      log_sums[threadIdx.x] = lse[statistics + first + threadIdx.x];
      dots[threadIdx.x] = row_dots[statistics + first + threadIdx.x];
    }
    __syncthreads();
    if (!active || first + J <= key) continue;

    float s[J], dp[J];
    dot_tile<HS, J>(s, k, queries_transposed);
    dot_tile<HS, J>(dp, v, d_outs_transposed);
#pragma unroll
    for (int i = 0; i < J; ++i) s[i] = key <= first + i && first + i < seq_len ? s[i] - log_sums[i] : 0.0f;
    exp_pack(s);
#pragma unroll
    for (int i = 0; i < J; ++i) {
      const bool sees_key = key <= first + i && first + i < seq_len;
      s[i] = sees_key ? s[i] : 0.0f;
      dp[i] = sees_key ? s[i] * (dp[i] - dots[i]) : 0.0f;
    }
    add_tile<HS, J>(dv, s, d_outs);
    add_tile<HS, J>(dk, dp, queries);
  }
  if (!active) return;
  store_head<HS, N>(dqkv + head_offset + channels + key * stride, dk, head_size, 1);
  store_head<HS, N>(dqkv + head_offset + 2 * channels + key * stride, dv, head_size, 1);
}

template <class Float>
constexpr bool tensor_core_type = has_tensor_cores && sizeof(Float) == 2;

// Calls function(integral_constant HS, integral_constant N) for the compiled head size that holds head_size.
template <class Float, class Function>
void with_head_size(int head_size, Function function) {
  if (head_size > 128)
    throw std::runtime_error("attention: head size " + std::to_string(head_size) + " is over 128");
  auto with_width = [&](auto width) {
    if (head_size <= 32) function(std::integral_constant<int, 32>{}, width);
    else if (head_size <= 64) function(std::integral_constant<int, 64>{}, width);
    else function(std::integral_constant<int, 128>{}, width);
  };
  // With tensor cores, 16-bit heads that fit packs are done by flash attention: only single elements are left.
  if constexpr (tensor_core_type<Float>) with_width(std::integral_constant<int, 1>{});
  else with_pack<Float>(head_size, with_width);
}

// Plans attention of this shape by the library, which takes about a second, once. Returns an empty string, or the
// reason why the library can't do it; then our own kernels do.
template <class Float>
std::string plan_attention(int batch, int seq_len, int heads, int head_size) {
  if constexpr (has_library_attention && sizeof(Float) != 2) return library_attention_name() + " can't: it has no fp32";
  else return plan_library_attention<Float>(batch, seq_len, heads, head_size);
}

template <class Float>
bool attention_is_planned(int batch, int seq_len, int heads, int head_size) {
  if constexpr (sizeof(Float) != 2) return false;
  else return library_attention_is_planned<Float>(batch, seq_len, heads, head_size);
}

// Computes out (B,T,C) and lse (B,NH,T) from qkv (B,T,3C), C = heads·head_size.
template <class Float>
void attention_forward(Float* out, float* lse, const Float* qkv, int batch, int seq_len, int heads, int head_size,
                       cudaStream_t stream) {
  const double rows = double(batch) * seq_len, channels = double(heads) * head_size;
  KernelRange range("attention_forward", stream, 4 * rows * channels * sizeof(Float), 2 * rows * seq_len * channels);
  range.writes(out, size_t(batch) * seq_len * heads * head_size);
  range.writes(lse, size_t(batch) * heads * seq_len);
  if constexpr (sizeof(Float) == 2)
    if (attention_is_planned<Float>(batch, seq_len, heads, head_size))
      return library_attention_forward(out, lse, qkv, batch, seq_len, heads, head_size, stream);
  if constexpr (tensor_core_type<Float>)
    if (flash_attention_fits(head_size))
      return flash_attention_forward(out, lse, qkv, batch, seq_len, heads, head_size, stream);
  const dim3 grid(ceil_div(seq_len, attention_rows), heads, batch);
  const float scale = 1.0f / sqrtf(float(head_size));
  with_head_size<Float>(head_size, [&](auto size, auto width) {
    constexpr int HS = decltype(size)::value, N = decltype(width)::value;
    attention_forward_kernel<Float, HS, N>
        <<<grid, attention_rows, 0, stream>>>(out, lse, qkv, seq_len, head_size, scale);
  });
  CUDA_CHECK(cudaGetLastError());
}

// Computes dqkv (B,T,3C) from dout (B,T,C) and the tensors of forward: out, qkv, lse. row_dots (B,NH,T): workspace.
template <class Float>
void attention_backward(Float* dqkv, float* row_dots, const Float* dout, const Float* out, const Float* qkv,
                        const float* lse, int batch, int seq_len, int heads, int head_size, cudaStream_t stream) {
  const double rows = double(batch) * seq_len, channels = double(heads) * head_size;
  const bool planned = attention_is_planned<Float>(batch, seq_len, heads, head_size);
  const int products = planned ? 5 : 7;
  KernelRange range("attention_backward", stream, 8 * rows * channels * sizeof(Float),
                    products * rows * seq_len * channels);
  range.writes(dqkv, 3 * size_t(batch) * seq_len * heads * head_size);
  if constexpr (sizeof(Float) == 2)
    if (planned)
      return library_attention_backward(dqkv, dout, out, qkv, lse, batch, seq_len, heads, head_size, stream);
  if constexpr (tensor_core_type<Float>)
    if (flash_attention_fits(head_size))
      return flash_attention_backward(dqkv, row_dots, dout, out, qkv, lse, batch, seq_len, heads, head_size, stream);
  const dim3 grid(ceil_div(seq_len, attention_rows), heads, batch);
  const float scale = 1.0f / sqrtf(float(head_size));
  with_head_size<Float>(head_size, [&](auto size, auto width) {
    constexpr int HS = decltype(size)::value, N = decltype(width)::value;
    attention_backward_queries_kernel<Float, HS, N>
        <<<grid, attention_rows, 0, stream>>>(dqkv, row_dots, dout, out, qkv, lse, seq_len, head_size, scale);
    attention_backward_keys_kernel<Float, HS, N>
        <<<grid, attention_rows, 0, stream>>>(dqkv, row_dots, dout, qkv, lse, seq_len, head_size, scale);
  });
  CUDA_CHECK(cudaGetLastError());
}
