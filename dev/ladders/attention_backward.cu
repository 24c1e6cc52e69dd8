// The ladder of causal self-attention's backward pass, from forward's results out and lse (kernels/attention/attention.cuh):
//
//   P = exp(S − lse),  dP = dO·Vᵀ,  D = Σ_d dO·O,  dS = P·(dP − D)
//   dQ = scale·dS·K,  dK = scale·dSᵀ·Q,  dV = Pᵀ·dO
//
// Least bytes: q, k, v, out and dout read once, dq, dk and dv written once: 8 elements of T per element of the output,
// and lse. FLOPs: 5·B·NH·T²·HS, the causal half of five products. As in the forward pass, the cost per pair of a query
// and a key decides. New in backward: a pair adds to two sums, to dQ, which is over keys, and to dK and dV, which are
// over queries. A thread can keep only one of the two sums for itself. The bytes below are at HS = 64 in bf16.
// "Counted" numbers are from the table of the CPU device, at T = 256.
#include "dev/ladders/attention.cuh"

namespace {

using namespace ladder;

template <class T>
struct AttentionBackward : Attention<T> {
  static constexpr const char* name = "attention_backward";
  static std::vector<Rung<AttentionBackward>> rungs();

  explicit AttentionBackward(const Shape& shape)
      : Attention<T>(shape), dout(this->out_count(), 1, 0, 2), out(this->out_count()), dqkv(this->qkv.size()),
        lse(this->lse_count()), row_dots(this->lse_count()), sums(this->qkv.size()),
        workspace(hopper_attention_workspace(this->sizes())), p(this->matrix_count()), dp(this->matrix_count()) {
    attention_forward<T>(out, lse, this->qkv, this->batch, this->seq_len, this->heads, this->head_size, nullptr);
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
  }

  void reset() { dqkv.poison(), row_dots.poison(), sums.poison(), workspace.poison(), p.poison(), dp.poison(); }
  double bytes() const { return 8.0 * out.size() * sizeof(T) + lse.size() * sizeof(float); }
  double flops() const { return 5 * this->product_flops(); }

  std::vector<Output> outputs() const {
    const AttentionReference expected = this->reference(dout.numbers());
    return {in_terms("dqkv", dqkv.numbers(), expected.dqkv, expected.dqkv_terms, rounding<T> + 4 * this->sum_error())};
  }

  struct Tensors {
    QkvHeads<T> dqkv;
    Heads<const T> dout, out;
    QkvHeads<const T> qkv;
  };
  Tensors tensors() const {
    return {this->qkv_heads_in(dqkv.data()), this->template heads_in<const T>(dout.data()),
            this->template heads_in<const T>(out.data()), this->template qkv_heads_in<const T>(this->qkv.data())};
  }

  RandomBuffer<T> dout;
  Buffer<T> out, dqkv;
  Buffer<float> lse, row_dots;  // D (B, NH, T)
  Buffer<float> sums;           // dqkv's shape
  Buffer<float> workspace;      // of Hopper's kernels
  Matrices p, dp;               // S, then P; dP, then dS
};

// ---- 1: four kernels, and two matrices between them
//
// Each step of the formulas is a kernel. Two matrices are written to memory, read, overwritten and read again: 44 bytes
// per pair, of 2·B·NH·T² floats that no cache can hold, where only 1,028/(T/2) bytes must be moved. Counted (9,740
// bytes per element, 606 times the least), S and dP cost most: a sector of 32 bytes for each element of a key and of a
// value, 4,096 bytes per pair. dK and dV go down the columns of the matrices, and need a sector for each 4 bytes.

template <class T>
__global__ void products_kernel(float* p, float* dp, const T* dout, const T* qkv, int seq_len, int head_size,
                                float scale) {
  const int query = blockIdx.x;
  const auto [q, k, v] = qkv_rows(qkv, seq_len, head_size);
  dot_rows(matrix_row(p, seq_len, query), query + 1, q[query], k, scale);
  dot_rows(matrix_row(dp, seq_len, query), query + 1, head_rows(dout, 1, 0, seq_len, head_size)[query], v, 1);
}

// In place: S becomes P, and dP becomes dS, with D = Σ_j P·dP, which is Σ_d dO·O.
__global__ void softmax_backward_kernel(float* p, float* dp, const float* lse, int seq_len) {
  __shared__ float scratch[32];
  const int query = blockIdx.x;
  const float log_sum = head_statistics(lse, seq_len)[query];
  float *p_row = matrix_row(p, seq_len, query), *dp_row = matrix_row(dp, seq_len, query), dot = 0;
  for (int j = threadIdx.x; j <= query; j += blockDim.x) {
    p_row[j] = expf(p_row[j] - log_sum);
    dot += p_row[j] * dp_row[j];
  }
  dot = block_reduce_sum(dot, scratch);
  for (int j = threadIdx.x; j <= query; j += blockDim.x) dp_row[j] = p_row[j] * (dp_row[j] - dot);
}

template <class T>
__global__ void query_sums_kernel(T* dqkv, const float* ds, const T* qkv, int seq_len, int head_size, float scale) {
  const int query = blockIdx.x;
  const HeadRows<const T> k = head_rows(qkv, 3, 1, seq_len, head_size);
  sum_rows(head_rows(dqkv, 3, 0, seq_len, head_size)[query], matrix_row(ds, seq_len, query), query + 1, k, scale);
}

template <class T>
__global__ void key_sums_kernel(T* dqkv, const float* p, const float* ds, const T* dout, const T* qkv,
                                int seq_len, int head_size, float scale) {
  const int key = blockIdx.x;
  const HeadRows<const T> q = head_rows(qkv, 3, 0, seq_len, head_size), d_o = head_rows(dout, 1, 0, seq_len, head_size);
  for (int d = threadIdx.x; d < head_size; d += blockDim.x) {
    float dk = 0, dv = 0;
    for (int query = key; query < seq_len; ++query) {
      dk += matrix_row(ds, seq_len, query)[key] * to_float(q[query][d]);
      dv += matrix_row(p, seq_len, query)[key] * to_float(d_o[query][d]);
    }
    head_rows(dqkv, 3, 1, seq_len, head_size)[key][d] = from_float<T>(scale * dk);
    head_rows(dqkv, 3, 2, seq_len, head_size)[key][d] = from_float<T>(dv);
  }
}

template <class T>
void four_kernels(AttentionBackward<T>& o, cudaStream_t stream) {
  const dim3 grid = o.grid(o.seq_len);
  float *p = o.p.data(), *dp = o.dp.data();
  products_kernel<T><<<grid, row_threads, 0, stream>>>(p, dp, o.dout.data(), o.qkv.data(), o.seq_len, o.head_size,
                                                       o.scale);
  softmax_backward_kernel<<<grid, row_threads, 0, stream>>>(p, dp, o.lse.data(), o.seq_len);
  query_sums_kernel<T><<<grid, row_threads, 0, stream>>>(o.dqkv.data(), dp, o.qkv.data(), o.seq_len, o.head_size,
                                                         o.scale);
  key_sums_kernel<T><<<grid, row_threads, 0, stream>>>(o.dqkv.data(), p, dp, o.dout.data(), o.qkv.data(), o.seq_len,
                                                       o.head_size, o.scale);
}

// ---- 2: P computed again from lse, one warp per query, dK and dV added up in memory by atomics
//
// P and dS of a pair are computed again, from lse and two products of 64 numbers. So there is no matrix, and T is not
// limited. D is dO·O, computed before the first key. The 32 threads of a warp (its lanes) read neighbouring elements of
// a head, so sectors are full, 256 bytes per pair: counted, a sixth of rung 1. But all queries add to the dK and dV of
// a key: 128 atomic additions of floats per pair, 512 bytes that the L2 cache reads and writes. They also wait for each
// other, because all queries begin at key 0. Their order differs from run to run, and so do the last bits of the
// result.

template <int N>
__device__ inline void atomic_add_lane(float* row, float factor, const float (&x)[N], int head_size) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int d = threadIdx.x % 32 + 32 * i;
    if (d < head_size) atomicAdd(row + d, factor * x[i]);
  }
}

// A lane's part of a query: its elements of q and dO, and the two numbers that all lanes have: D and lse.
template <int N>
struct Query {
  float q[N], d_out[N], dot, log_sum;
};

template <int N, class T>
__device__ Query<N> load_query(int query, const HeadRows<const T>& q_rows, const T* dout, const T* out, const float* lse,
                               int seq_len, int head_size) {
  Query<N> lane;
  float o[N];
  load_lane(lane.q, q_rows[query], head_size);
  load_lane(lane.d_out, head_rows(dout, 1, 0, seq_len, head_size)[query], head_size);
  load_lane(o, head_rows(out, 1, 0, seq_len, head_size)[query], head_size);
  lane.dot = warp_dot(lane.d_out, o);
  lane.log_sum = head_statistics(lse, seq_len)[query];
  return lane;
}

template <int N, class T>
__global__ void atomics_kernel(float* sums, const T* dout, const T* out, const T* qkv, const float* lse, int seq_len,
                               int head_size, float scale) {
  const int query = warp_row();
  if (query >= seq_len) return;
  const auto [q_rows, k_rows, v_rows] = qkv_rows(qkv, seq_len, head_size);
  const HeadRows<float> dk_rows = head_rows(sums, 3, 1, seq_len, head_size);
  const HeadRows<float> dv_rows = head_rows(sums, 3, 2, seq_len, head_size);
  const auto [q, d_out, dot, log_sum] = load_query<N>(query, q_rows, dout, out, lse, seq_len, head_size);
  float dq[N] = {};
  for (int key = 0; key <= query; ++key) {
    float k[N], v[N];
    load_lane(k, k_rows[key], head_size);
    load_lane(v, v_rows[key], head_size);
    const float p = expf(scale * warp_dot(q, k) - log_sum), ds = p * (warp_dot(d_out, v) - dot);
    add_lane(dq, ds, k);
    atomic_add_lane(dk_rows[key], scale * ds, q, head_size);
    atomic_add_lane(dv_rows[key], p, d_out, head_size);
  }
  store_lane(head_rows(sums, 3, 0, seq_len, head_size)[query], dq, head_size, scale);
}

template <class T>
void atomics(AttentionBackward<T>& o, cudaStream_t stream) {
  const size_t count = o.sums.size();
  CUDA_CHECK(cudaMemsetAsync(o.sums, 0, count * sizeof(float), stream));
  with_lane_elements(o.head_size, [&](auto n) {
    atomics_kernel<decltype(n)::value, T><<<o.grid(warp_blocks(o.seq_len)), 32 * warps_per_block, 0, stream>>>(
        o.sums.data(), o.dout.data(), o.out.data(), o.qkv.data(), o.lse.data(), o.seq_len, o.head_size, o.scale);
  });
  round_kernel<T><<<blocks_for(count, 256), 256, 0, stream>>>(o.dqkv.data(), o.sums.data(), count);
}

// ---- 3: one warp per query, then one warp per key
//
// A sum stays in the registers of the warp that computes it: first each query sums its dQ over the keys, then each key
// sums its dK and dV over the queries. There are no atomics, no fp32 workspace and no waiting, and the bits are the
// same every time. The price: S and dP are computed twice, so there are 7 products instead of 5 and twice as many
// shuffles (20 per pair). Another 320 bytes per pair are read: q, dO, and one sector each for lse and D. That is still
// a quarter less than with the 512 bytes of the atomics.

template <int N, class T>
__global__ void warp_per_query_kernel(T* dqkv, float* row_dots, const T* dout, const T* out, const T* qkv,
                                      const float* lse, int seq_len, int head_size, float scale) {
  const int query = warp_row();
  if (query >= seq_len) return;
  const auto [q_rows, k_rows, v_rows] = qkv_rows(qkv, seq_len, head_size);
  const auto [q, d_out, dot, log_sum] = load_query<N>(query, q_rows, dout, out, lse, seq_len, head_size);
  float dq[N] = {};
  for (int key = 0; key <= query; ++key) {
    float k[N], v[N];
    load_lane(k, k_rows[key], head_size);
    load_lane(v, v_rows[key], head_size);
    const float p = expf(scale * warp_dot(q, k) - log_sum);
    add_lane(dq, p * (warp_dot(d_out, v) - dot), k);
  }
  store_lane(head_rows(dqkv, 3, 0, seq_len, head_size)[query], dq, head_size, scale);
  if (threadIdx.x % 32 == 0) head_statistics(row_dots, seq_len)[query] = dot;
}

template <int N, class T>
__global__ void warp_per_key_kernel(T* dqkv, const float* row_dots, const T* dout, const T* qkv, const float* lse,
                                    int seq_len, int head_size, float scale) {
  const int key = warp_row();
  if (key >= seq_len) return;
  const auto [q_rows, k_rows, v_rows] = qkv_rows(qkv, seq_len, head_size);
  const HeadRows<const T> d_out_rows = head_rows(dout, 1, 0, seq_len, head_size);
  const float *log_sums = head_statistics(lse, seq_len), *dots = head_statistics(row_dots, seq_len);
  float k[N], v[N], dk[N] = {}, dv[N] = {};
  load_lane(k, k_rows[key], head_size);
  load_lane(v, v_rows[key], head_size);
  for (int query = key; query < seq_len; ++query) {
    float q[N], d_out[N];
    load_lane(q, q_rows[query], head_size);
    load_lane(d_out, d_out_rows[query], head_size);
    const float p = expf(scale * warp_dot(q, k) - log_sums[query]);
    add_lane(dk, p * (warp_dot(d_out, v) - dots[query]), q);
    add_lane(dv, p, d_out);
  }
  store_lane(head_rows(dqkv, 3, 1, seq_len, head_size)[key], dk, head_size, scale);
  store_lane(head_rows(dqkv, 3, 2, seq_len, head_size)[key], dv, head_size, 1);
}

template <class T>
void two_kernels(AttentionBackward<T>& o, cudaStream_t stream) {
  const dim3 grid = o.grid(warp_blocks(o.seq_len));
  with_lane_elements(o.head_size, [&](auto n) {
    constexpr int N = decltype(n)::value, threads = 32 * warps_per_block;
    warp_per_query_kernel<N, T><<<grid, threads, 0, stream>>>(o.dqkv.data(), o.row_dots.data(), o.dout.data(),
                                                              o.out.data(), o.qkv.data(), o.lse.data(), o.seq_len,
                                                              o.head_size, o.scale);
    warp_per_key_kernel<N, T><<<grid, threads, 0, stream>>>(o.dqkv.data(), o.row_dots.data(), o.dout.data(),
                                                            o.qkv.data(), o.lse.data(), o.seq_len, o.head_size,
                                                            o.scale);
  });
}

// ---- 4: tiles of the other side in shared memory
//
// As in the forward pass, 64 queries (or keys) share tiles of the other side: 8 bytes per pair instead of 576; with
// their own rows, counted, a 22nd. A thread has a row for itself, so no shuffle is needed, and an exponential is
// computed once instead of by 32 lanes. A pair takes 448 multiply-adds, 14 instructions of a warp. The model runs this
// in fp32.

template <class T>
void tiles(AttentionBackward<T>& o, cudaStream_t stream) {
  const dim3 grid = o.grid(ceil_div(o.seq_len, attention_rows));
  const auto [dqkv, dout, out, qkv] = o.tensors();
  with_tile_sizes<T>(o.head_size, [&](auto size, auto width) {
    constexpr int HS = decltype(size)::value, N = decltype(width)::value;
    attention_backward_queries_kernel<T, T, HS, N><<<grid, attention_rows, 0, stream>>>(
        dqkv, o.row_dots.data(), dout, out, qkv, o.lse.data(), o.sizes(), o.scale, Unseen());
    attention_backward_keys_kernel<T, T, HS, N><<<grid, attention_rows, 0, stream>>>(
        dqkv, o.row_dots.data(), dout, qkv, o.lse.data(), o.sizes(), o.scale, Unseen());
  });
}

// ---- 5: the products on tensor cores
//
// Seven products are 7·4 mma for 16 × 8 pairs, 0.22 per pair. P and dS pass from one product to the next in registers,
// rounded to 16 bits. Operands are loaded by ldmatrix: counted, 1,070 wavefronts for 1,000 elements instead of 36,000.
// 128 rows share each row of the other side: 4 bytes per pair. The model runs this in 16 bits
// (kernels/attention/flash_attention.cuh).

template <class T>
void tensor_cores(AttentionBackward<T>& o, cudaStream_t stream) {
  const auto [dqkv, dout, out, qkv] = o.tensors();
  if constexpr (sizeof(T) == 2)
    flash_attention_backward(dqkv, o.row_dots.data(), dout, out, qkv, o.lse.data(), o.sizes(), stream);
}

// ---- 6: Hopper's copy engine and asynchronous tensor cores, and five products
//
// wgmma reads its operands from shared memory, so that 8 warps have registers for dK and dV of 128 keys, and for S and
// dP beside them. These are computed once: five products instead of seven. There remains the block's part of dQ, which
// the copy engine adds to sums in memory. Blocks wait for each other there, so that the order, and the bits, are the
// same every time (extensions/hopper/kernels/hopper_attention_backward.cuh). Counted, it moves about as much as rung 5
// and reads shared memory a quarter as often.

template <class T>
void hopper(AttentionBackward<T>& o, cudaStream_t stream) {
  const auto [dqkv, dout, out, qkv] = o.tensors();
  if constexpr (sizeof(T) == 2)
    hopper_attention_backward(dqkv, o.row_dots.data(), o.workspace.data(), dout, out, qkv, o.lse.data(), o.sizes(),
                              stream);
}

// ---- a library, which the model prefers where it is compiled in

template <class T>
void library(AttentionBackward<T>& o, cudaStream_t stream) {
  attention_backward<T>(o.dqkv, o.row_dots, o.dout, o.out, o.qkv, o.lse, o.batch, o.seq_len, o.heads, o.head_size,
                        stream);
}

template <class T>
std::vector<Rung<AttentionBackward<T>>> AttentionBackward<T>::rungs() {
  return {
      {"four_kernels", "the formulas: products, softmax, sums, two T×T matrices between them", four_kernels<T>},
      {"atomics", "P anew from lse: no matrix; one warp per query adds to its keys' dK, dV", atomics<T>},
      {"two_kernels", "one warp per query, then one warp per key: 7 products for 5, no atomics", two_kernels<T>},
      {"tiles", "kernels/attention/attention.cuh: 64 rows share each row of the other side", tiles<T>},
      {"tensor_cores", "kernels/attention/flash_attention.cuh: mma, a tile ahead, 128 rows", tensor_cores<T>, suits_tensor_cores},
      {"hopper", "extensions/hopper/kernels/hopper_attention_backward.cuh: wgmma, 5 products, dQ added in order", hopper<T>,
       suits_hopper},
      {"library", "attention_backward by cuDNN", library<T>, suits_library, true},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<AttentionBackward>(count, arguments); }
