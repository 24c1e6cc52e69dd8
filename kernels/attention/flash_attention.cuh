// Attention on tensor cores, for bf16 and fp16. Maths and tensors are as in kernels/attention/attention.cuh; the
// method is FlashAttention-2's (Dao, arXiv:2307.08691, algorithms 1 and 2), exponentials to base 2:
//
//   forward   S = Q·Kᵀ,  P = 2^(c·(S − m)),  O += P·V     c = log2(e)/√HS, m the running maximum of the row
//   backward  P = 2^(c·S − lse·log2 e),  dP = dO·Vᵀ,  dS = P·(dP − D),  dQ += dS·K
//             and of the transposes, Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ:  dV += Pᵀ·dO,  dK += dSᵀ·Q
//
// A block of 4 warps owns 64·M queries (forward, dQ) or keys (dK, dV) of one head, and each warp owns 16·M of these,
// whose sums stay in its registers. No sum is shared by two warps, so the result never depends on timing. J rows of the
// other side at a time go through shared memory: while they are used, cp.async loads the next ones. Blocks and warps
// skip tiles in which no query sees a key; only tiles in which some query does not see all keys are masked. S and dP
// never leave the registers. P and dS are rounded to Float, because they are left operands of the second product.
// Blocks with most tiles start first.
//
// Non-finite inputs are not hidden: exp2 keeps NaN, and a row whose largest score is infinite becomes NaN.
//
// Bytes and FLOPs are as in kernels/attention/attention.cuh, backward 7/2 of forward's: S and dP are computed for dQ
// and again for dK, dV. That makes 7 products instead of 5, and needs neither atomics nor a workspace.
//
// Limits of the loops on Hopper, in SM cycles per warp and tile: a multiply_m16n8k16 takes 1.6 (mma reaches about 62%
// of wgmma's 4096 FLOPs per cycle), a load_matrices 4 (128 bytes per cycle), an exp2 of all lanes 2, and 4 instructions
// are issued per cycle. The 8 warps of an SM overlap most of this, so the largest number of a line is the least time
// per tile:
//
//                     M   J   products   load_matrices   exp2   issue
//   forward, HS 64    2  64        205             160    136     168
//   forward, HS 128   2  32        205             192     72     145
//   dQ, HS 64         2  48        230             208     96     135
//   dQ, HS 128        2  32        307             320     64     140
//   dK dV, HS 64      2  32        205             192     64     132
//   dK dV, HS 128     1  48        307             448     48     165
//
// M = 2 loads half as much per product as M = 1, but the sums of dK and dV at HS = 128 leave no registers for it.
// gpt2, B=64, T=1024, per layer: 103 GFLOP forward, 361 backward. At the 35% of 989 TFLOP/s that FlashAttention-2
// reaches on an H100 (arXiv:2407.08608; ours: dev/results/2026-11-26-h200.md) that takes 0.3 and 1.0 ms; moving the
// bytes takes 0.1 and 0.2 ms at 4.3 TB/s.
// Its barriers are tested by test_attention.
#pragma once

#include "kernels/attention/attention_shape.h"
#include "kernels/device/tensor_tiles.cuh"

constexpr int flash_threads = 128;

// The largest tiles whose accumulators (forward 16M·(HS + J) floats per warp, dQ 16M·(HS + 2J), dK and dV
// 16M·(2HS + 2J)) fit 255 registers per lane: `nvcc -Xptxas -v` reports no spills for sm_80, sm_90a and sm_100a.
struct FlashShape {
  int M, J;
};
template <int HS>
constexpr FlashShape forward_shape = HS == 64 ? FlashShape{2, 64} : FlashShape{2, 32};
template <int HS>
constexpr FlashShape queries_shape = HS == 64 ? FlashShape{2, 48} : FlashShape{2, 32};
template <int HS>
constexpr FlashShape keys_shape = HS == 64 ? FlashShape{2, 32} : FlashShape{1, 48};

// The rows (count, HS) of this block's head.
template <class T>
__device__ inline HeadRows<T> head_rows(const Heads<T>& heads, int count, int head_size) {
  return {heads.data + blockIdx.z * heads.strides.sample + blockIdx.y * head_size, heads.strides.row, count, head_size};
}

template <class T>
struct QkvRows {
  HeadRows<T> q, k, v;
};
template <class T>
__device__ inline QkvRows<T> qkv_rows(const QkvHeads<T>& heads, const AttentionSizes& sizes) {
  return {head_rows(heads.q, sizes.queries, sizes.head_size), head_rows(heads.k, sizes.keys, sizes.head_size),
          head_rows(heads.v, sizes.keys, sizes.head_size)};
}

// The values (queries) of this block's head in a tensor (B, NH, queries).
template <class T>
__device__ inline T* head_statistics(T* tensor, int queries) {
  return tensor + (size_t(blockIdx.z) * gridDim.y + blockIdx.y) * queries;
}

// The two tiles (keys and values, or Q and dO) for rows [first, first + J) of the other side. `tiles` (2, 2, J, HS) has
// room for two such pairs, which are used in turn.
template <int HS, int J, class Float>
__device__ inline Float* tile_pair(Float* tiles, int first) {
  return tiles + first / J % 2 * (2 * J * HS);
}

template <int HS, int J, class Float>
__device__ inline void copy_tile_pair(Float* tiles, const HeadRows<const Float>& a, const HeadRows<const Float>& b,
                                      int first) {
  copy_tile<HS, J, flash_threads>(tile_pair<HS, J>(tiles, first), a, first);
  copy_tile<HS, J, flash_threads>(tile_pair<HS, J>(tiles, first) + J * HS, b, first);
}

// s holds scores of queries from first_query on with keys from first_key on. Sets those to −∞ whose key the query does
// not see.
template <int M, int N>
__device__ inline void hide_unseen_keys(float (&s)[M][N][4], int first_key, int first_query,
                                        const AttentionSizes& sizes) {
  if (first_key + 8 * N - 1 <= sizes.last_key(first_query)) return;
  for_each_element([&](Place at, float& x) {
    if (first_key + at.column > sizes.last_key(first_query + at.row)) x = -INFINITY;
  }, s);
}

// The end of the keys that the queries in [first, first + count) see; 0 if there are no such queries.
__device__ inline int end_of_seen_keys(int first, int count, const AttentionSizes& sizes) {
  return first < sizes.queries ? sizes.last_key(min(first + count, sizes.queries) - 1) + 1 : 0;
}

// Raises `maximum` to the tile's maximum, and replaces s by P = 2^(factor·(s − maximum)). The caller has to multiply
// its earlier sums by correction = 2^(factor·(old − new maximum)). Each lane adds its own columns to `sum`.
//
// factor·s − exponent is rounded once, but the exponent, factor·maximum, is rounded too, which multiplies P and its sum
// by the same power of 2. Where it is above 2^26, that would soon be more than Float holds. There a unit in the last place
// of a score is 4, and products are off by more. So a factor that is a power of 2, at most twice too small, is as right
// as any other, and makes the exponent exact.
template <int M, int N>
__device__ inline void online_softmax(float (&s)[M][N][4], float (&maximum)[M][2], float (&sum)[M][2],
                                      float (&correction)[M][2], float factor) {
  float old[M][2], exponent[M][2], base[M][2];
  const float power_of_2 = __uint_as_float(__float_as_uint(factor) & 0x7f800000u);
  for_each_row<M>([&](int, int m, int half) { old[m][half] = maximum[m][half]; });
  for_each_element([&](Place at, float x) { maximum[at.m][at.half] = fmaxf(maximum[at.m][at.half], x); }, s);
  for_each_row<M>([&](int, int m, int half) {
    maximum[m][half] = quad_max(maximum[m][half]);
    correction[m][half] = exp2_approximate(factor * (old[m][half] - maximum[m][half]));
    base[m][half] = fabsf(factor * maximum[m][half]) < 0x1p26f ? factor : power_of_2;
    exponent[m][half] = base[m][half] * maximum[m][half];
    sum[m][half] *= correction[m][half];
  });
  for_each_element([&](Place at, float& x) {
    x = exp2_approximate(base[at.m][at.half] * x - exponent[at.m][at.half]);
    sum[at.m][at.half] += x;
  }, s);
}

// log Σ exp of a row of scores. Backward computes P = 2^(c·S − lse·log2 e) in four roundings of numbers like these, which
// may be off by |maximum|·2^-22. Where that is more than 4, lse is larger by as much, so that P does not overflow.
__device__ inline float log_sum_exp(float maximum, float total) {
  return maximum + logf(total) + fmaxf(0.0f, fabsf(maximum) * 0x1p-22f - 4.0f);
}

template <class Float, int HS, class Seen>
__global__ void __launch_bounds__(flash_threads, 2)
flash_forward_kernel(Heads<Float> out, float* lse, QkvHeads<const Float> qkv, AttentionSizes sizes, float scale, Seen seen) {
  constexpr int M = forward_shape<HS>.M, J = forward_shape<HS>.J, rows = flash_threads / 2 * M;
  extern __shared__ __align__(128) char memory[];
  Float* queries = reinterpret_cast<Float*>(memory);  // (rows, HS)
  Float* tiles = queries + rows * HS;                 // (2, 2, J, HS): keys and values
  const auto [q, k, v] = qkv_rows(qkv, sizes);
  const int block_first = (gridDim.x - 1 - blockIdx.x) * rows;
  const int warp_row = threadIdx.x / 32 * 16 * M, first_query = block_first + warp_row;
  const int block_end = end_of_seen_keys(block_first, rows, sizes);
  const int warp_end = end_of_seen_keys(first_query, 16 * M, sizes);
  const float factor = scale * log2_e;

  float o[M][HS / 8][4] = {}, maximum[M][2], sum[M][2] = {}, correction[M][2];
  for_each_row<M>([&](int, int m, int half) { maximum[m][half] = -INFINITY; });
  copy_tile<HS, rows, flash_threads>(queries, q, block_first);
  copy_tile_pair<HS, J>(tiles, k, v, 0);
  for (int first = 0; first < block_end; first += J) {
    wait_for_copies();
    __syncthreads();  // this tile is there for all, and all have used the last one
    if (first + J < block_end) copy_tile_pair<HS, J>(tiles, k, v, first + J);
    if (first >= warp_end) continue;

    const Float *keys = tile_pair<HS, J>(tiles, first), *values = keys + J * HS;
    float s[M][J / 8][4] = {};
    multiply_transposed<HS>(s, queries, warp_row, keys);
    hide_unseen_keys(s, first, first_query, sizes);
    online_softmax(s, maximum, sum, correction, factor);
    for_each_element([&](Place at, float& x) { x *= correction[at.m][at.half]; }, o);
    multiply<HS>(o, s, values);
  }

  float inverse[M][2];
  for_each_row<M>([&](int row, int m, int half) {
    const float total = quad_sum(sum[m][half]);
    inverse[m][half] = 1.0f / total;
    if (threadIdx.x % 4 == 0 && first_query + row < sizes.queries)
      head_statistics(lse, sizes.queries)[first_query + row] = log_sum_exp(scale * maximum[m][half], total);
  });
  for_each_element([&](Place at, float& x) { x *= inverse[at.m][at.half]; }, o);
  store_rows<HS>(head_rows(out, sizes.queries, sizes.head_size), first_query, o, 1.0f, seen);
}

// dots = Σ_d a[d]·b[d] of rows first, first + 1, ..., each computed by the four lanes that share it. Rows after the
// last one are that one again. All loads are issued before the first is used.
template <int HS, int M, class Float>
__device__ inline void dot_rows(float (&dots)[M][2], const HeadRows<const Float>& a, const HeadRows<const Float>& b,
                                int first) {
  PackWords<Float, 8> a_packs[M][2][HS / 32] = {}, b_packs[M][2][HS / 32] = {};
  for_each_row<M>([&](int row, int m, int half) {
    const int existing = min(first + row, a.count - 1);
#pragma unroll
    for (int pack = 0; pack < HS / 32; ++pack) {
      const int d = 32 * pack + threadIdx.x % 4 * 8;
      if (d >= a.head_size) continue;
      a_packs[m][half][pack] = load_pack<8>(a[existing] + d);
      b_packs[m][half][pack] = load_pack<8>(b[existing] + d);
    }
  });
  for_each_row<M>([&](int, int m, int half) {
    float sum = 0, x[8], y[8];
#pragma unroll
    for (int pack = 0; pack < HS / 32; ++pack) {
      unpack(a_packs[m][half][pack], x);
      unpack(b_packs[m][half][pack], y);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
    }
    dots[m][half] = quad_sum(sum);
  });
}

// Computes dQ, and D (row_dots) for the next kernel.
template <class Float, class Gradient, int HS, class Seen>
__global__ void __launch_bounds__(flash_threads, 2)
flash_backward_queries_kernel(QkvHeads<Gradient> dqkv, float* row_dots, Heads<const Float> dout,
                              Heads<const Float> out, QkvHeads<const Float> qkv, const float* lse,
                              AttentionSizes sizes, float scale, Seen seen) {
  constexpr int M = queries_shape<HS>.M, J = queries_shape<HS>.J, rows = flash_threads / 2 * M;
  extern __shared__ __align__(128) char memory[];
  Float* queries = reinterpret_cast<Float*>(memory);  // (rows, HS)
  Float* douts = queries + rows * HS;                 // (rows, HS)
  Float* tiles = douts + rows * HS;                   // (2, 2, J, HS): keys and values
  const auto [q, k, v] = qkv_rows(qkv, sizes);
  const HeadRows<const Float> o = head_rows(out, sizes.queries, sizes.head_size);
  const HeadRows<const Float> d_o = head_rows(dout, sizes.queries, sizes.head_size);
  const int block_first = (gridDim.x - 1 - blockIdx.x) * rows;
  const int warp_row = threadIdx.x / 32 * 16 * M, first_query = block_first + warp_row;
  const int block_end = end_of_seen_keys(block_first, rows, sizes);
  const int warp_end = end_of_seen_keys(first_query, 16 * M, sizes);
  const float factor = scale * log2_e;

  copy_tile<HS, rows, flash_threads>(queries, q, block_first);
  copy_tile<HS, rows, flash_threads>(douts, d_o, block_first);
  copy_tile_pair<HS, J>(tiles, k, v, 0);
  float log_sums[M][2], dots[M][2];
  dot_rows<HS>(dots, d_o, o, first_query);
  for_each_row<M>([&](int row, int m, int half) {
    const int query = min(first_query + row, sizes.queries - 1);  // later rows compute values that are not stored
    log_sums[m][half] = log2_e * head_statistics(lse, sizes.queries)[query];
    if (threadIdx.x % 4 == 0 && first_query + row < sizes.queries)
      head_statistics(row_dots, sizes.queries)[query] = dots[m][half];
  });

  float dq[M][HS / 8][4] = {};
  for (int first = 0; first < block_end; first += J) {
    wait_for_copies();
    __syncthreads();  // this tile is there for all, and all have used the last one
    if (first + J < block_end) copy_tile_pair<HS, J>(tiles, k, v, first + J);
    if (first >= warp_end) continue;

    const Float *keys = tile_pair<HS, J>(tiles, first), *values = keys + J * HS;
    float s[M][J / 8][4] = {}, dp[M][J / 8][4] = {};
    multiply_transposed<HS>(s, queries, warp_row, keys);
    hide_unseen_keys(s, first, first_query, sizes);
    multiply_transposed<HS>(dp, douts, warp_row, values);
    for_each_element([&](Place at, float& x, float dp) {
      x = exp2_approximate(factor * x - log_sums[at.m][at.half]) * (dp - dots[at.m][at.half]);
    }, s, dp);
    multiply<HS>(dq, s, keys);
  }
  store_rows<HS>(head_rows(dqkv.q, sizes.queries, sizes.head_size), first_query, dq, scale, seen);
}

// Computes dK and dV.
template <class Float, class Gradient, int HS, class Seen>
__global__ void __launch_bounds__(flash_threads, 2)
flash_backward_keys_kernel(QkvHeads<Gradient> dqkv, const float* row_dots, Heads<const Float> dout,
                           QkvHeads<const Float> qkv, const float* lse, AttentionSizes sizes, float scale, Seen seen) {
  constexpr int M = keys_shape<HS>.M, J = keys_shape<HS>.J, rows = flash_threads / 2 * M;
  extern __shared__ __align__(128) char memory[];
  Float* keys = reinterpret_cast<Float*>(memory);                            // (rows, HS)
  Float* values = keys + rows * HS;                                          // (rows, HS)
  Float* tiles = values + rows * HS;                                         // (2, 2, J, HS): Q and dO
  float* statistics = reinterpret_cast<float*>(tiles + 2 * 2 * J * HS);  // (2, 2, J): lse and D
  const auto [q, k, v] = qkv_rows(qkv, sizes);
  const HeadRows<const Float> d_o = head_rows(dout, sizes.queries, sizes.head_size);
  const int block_first = blockIdx.x * rows, warp_row = threadIdx.x / 32 * 16 * M, first_key = block_first + warp_row;
  const int block_start = sizes.first_query(block_first), diagonal = first_key - sizes.diagonal();
  const float factor = scale * log2_e;

  // Rows after the last query are filled with zeros, lse and D too. So P is 1 and dS is 0 there, and both are
  // multiplied by rows of zeros: they add nothing.
  auto copy_queries = [&](int first) {
    copy_tile_pair<HS, J>(tiles, q, d_o, first);
    const int i = threadIdx.x, query = min(first + i, sizes.queries - 1);
    const bool inside = first + i < sizes.queries;
    float* to = tile_pair<1, J>(statistics, first);
    if (i < J) copy_async<4>(to + i, head_statistics(lse, sizes.queries) + query, inside);
    if (i < J) copy_async<4>(to + J + i, head_statistics(row_dots, sizes.queries) + query, inside);
  };
  if (block_start < sizes.queries) {  // otherwise no query sees these keys, and their gradients are zero
    copy_tile<HS, rows, flash_threads>(keys, k, block_first);
    copy_tile<HS, rows, flash_threads>(values, v, block_first);
    copy_queries(block_start);
  }

  float dk[M][HS / 8][4] = {}, dv[M][HS / 8][4] = {};
  for (int first = block_start; first < sizes.queries; first += J) {
    wait_for_copies();
    __syncthreads();  // this tile is there for all, and all have used the last one
    if (first + J < sizes.queries) copy_queries(first + J);
    if (first + J <= diagonal || first_key >= sizes.keys) continue;

    const Float *queries = tile_pair<HS, J>(tiles, first), *douts = queries + J * HS;
    const float *log_sums = tile_pair<1, J>(statistics, first), *dots = log_sums + J;
    float p[M][J / 8][4] = {}, ds[M][J / 8][4] = {};
    multiply_transposed<HS>(p, keys, warp_row, queries);
    if (first < diagonal + 16 * M - 1)
      for_each_element([&](Place at, float& x) { if (first + at.column < diagonal + at.row) x = -INFINITY; }, p);
    for_each_element([&](Place at, float& x) { x = exp2_approximate(factor * x - log2_e * log_sums[at.column]); }, p);
    multiply<HS>(dv, p, douts);
    multiply_transposed<HS>(ds, values, warp_row, douts);
    for_each_element([&](Place at, float& x, float p) { x = p * (x - dots[at.column]); }, ds, p);
    multiply<HS>(dk, ds, queries);
  }
  store_rows<HS>(head_rows(dqkv.k, sizes.keys, sizes.head_size), first_key, dk, scale, seen);
  store_rows<HS>(head_rows(dqkv.v, sizes.keys, sizes.head_size), first_key, dv, 1.0f, seen);
}

// Bytes of shared memory that a block needs if it keeps `own` tiles of its own rows.
template <class Float, int HS>
constexpr int flash_shared_bytes(FlashShape shape, int own) {
  return (own * flash_threads / 2 * shape.M + 2 * 2 * shape.J) * HS * int(sizeof(Float));
}

// Can these kernels do heads whose sizes and places are multiples of `unit` elements? They read chunks of 16 bytes.
inline bool flash_attention_fits(int unit, int head_size) { return unit % 8 == 0 && head_size <= 128; }

// Calls function(integral_constant HS) for the compiled head size that holds head_size.
template <class Function>
void with_compiled_head_size(int head_size, Function function) {
  if (head_size <= 64) function(std::integral_constant<int, 64>{});
  else function(std::integral_constant<int, 128>{});
}

// These two have the same arguments as attention_forward and attention_backward, which call them
// (kernels/attention/attention.cuh).
template <class Float>
void flash_attention_forward(const Heads<Float>& out, float* lse, const QkvHeads<const Float>& qkv,
                             const AttentionSizes& sizes, cudaStream_t stream, float* maximum = nullptr) {
  with_compiled_head_size(sizes.head_size, [&](auto HS) {
    constexpr int rows = flash_threads / 2 * forward_shape<HS>.M;
    constexpr int bytes = flash_shared_bytes<Float, HS>(forward_shape<HS>, 1);
    const dim3 grid(ceil_div(sizes.queries, rows), sizes.heads, sizes.batch);
    with_maximum<Float>(maximum, [&](auto seen) {
      using Seen = decltype(seen);
      allow_shared_memory(flash_forward_kernel<Float, HS, Seen>, bytes);
      flash_forward_kernel<Float, HS, Seen><<<grid, flash_threads, bytes, stream>>>(out, lse, qkv, sizes, sizes.scale(), seen);
    });
  });
}

template <class Float, class Gradient>
void flash_attention_backward(const QkvHeads<Gradient>& dqkv, float* row_dots, const Heads<const Float>& dout,
                              const Heads<const Float>& out, const QkvHeads<const Float>& qkv, const float* lse,
                              const AttentionSizes& sizes, cudaStream_t stream, float* maximum = nullptr) {
  with_compiled_head_size(sizes.head_size, [&](auto HS) {
    constexpr int query_rows = flash_threads / 2 * queries_shape<HS>.M, key_rows = flash_threads / 2 * keys_shape<HS>.M;
    constexpr int query_bytes = flash_shared_bytes<Float, HS>(queries_shape<HS>, 2);
    constexpr int key_bytes =
        flash_shared_bytes<Float, HS>(keys_shape<HS>, 2) + 2 * 2 * keys_shape<HS>.J * sizeof(float);
    const dim3 query_grid(ceil_div(sizes.queries, query_rows), sizes.heads, sizes.batch);
    const dim3 key_grid(ceil_div(sizes.keys, key_rows), sizes.heads, sizes.batch);
    with_maximum<Gradient>(maximum, [&](auto seen) {
      using Seen = decltype(seen);
      allow_shared_memory(flash_backward_queries_kernel<Float, Gradient, HS, Seen>, query_bytes);
      flash_backward_queries_kernel<Float, Gradient, HS, Seen><<<query_grid, flash_threads, query_bytes, stream>>>(
          dqkv, row_dots, dout, out, qkv, lse, sizes, sizes.scale(), seen);
      allow_shared_memory(flash_backward_keys_kernel<Float, Gradient, HS, Seen>, key_bytes);
      flash_backward_keys_kernel<Float, Gradient, HS, Seen><<<key_grid, flash_threads, key_bytes, stream>>>(
          dqkv, row_dots, dout, qkv, lse, sizes, sizes.scale(), seen);
    });
  });
}
