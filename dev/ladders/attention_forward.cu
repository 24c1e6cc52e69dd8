// The ladder of causal self-attention's forward pass: S = scale·Q·Kᵀ (keys ≤ query), P = softmax(S), O = P·V.
//
// Least bytes: q, k and v read once, out written once: 4 elements of T per element of the output, and lse. FLOPs:
// 2·B·NH·T²·HS, the causal half of two products. At T = 1024 that is 256 FLOPs per byte of bf16, and an H100 can do 295
// for each byte that it reads (989 TFLOP/s, 3.35 TB/s). So keys must not be read again for each query, and the products
// must be done on tensor cores. The bytes below are at HS = 64 in bf16. "Counted" numbers are from the table of the CPU
// device, at T = 256.
#include "dev/ladders/attention.cuh"
#include "dev/ladders/device.cuh"

namespace {

using namespace ladder;

template <class T>
struct AttentionForward : Attention<T> {
  static constexpr const char* name = "attention_forward";
  static std::vector<Rung<AttentionForward>> rungs();

  explicit AttentionForward(const Shape& shape)
      : Attention<T>(shape), out(this->out_count()), lse(this->lse_count()), scores(this->matrix_count()) {}

  void reset() { out.poison(), lse.poison(), scores.poison(); }
  double bytes() const { return 4.0 * out.size() * sizeof(T) + lse.size() * sizeof(float); }
  double flops() const { return 2 * this->product_flops(); }

  std::vector<Output> outputs() const {
    const AttentionReference expected = this->reference(std::vector<double>(out.size()));
    return {{"lse", lse.numbers(), expected.lse, 1, this->sum_error()},
            in_terms("out", out.numbers(), expected.out, expected.out_terms, rounding<T> + this->sum_error())};
  }

  Buffer<T> out;
  Buffer<float> lse;
  Matrices scores;  // S, then P
};

// ---- 1: three kernels, and a matrix between them
//
// Each step of the formula is a kernel. S is written to memory and read again, three times for the softmax: 28 bytes
// per pair, of B·NH·T² floats that no cache can hold, where only 516/(T/2) bytes must be moved. Counted (4,690 bytes
// per element, 582 times the least), something else costs more: the 32 threads of a warp read 32 keys, which are rows
// apart, so each element of 2 bytes takes a sector of 32 bytes. A pair asks for 2,048 bytes of K to use 128 of them;
// the other 15/16 of each sector are of use only if the L1 cache still has them later.

template <class T>
__global__ void scores_kernel(float* scores, const T* qkv, int seq_len, int head_size, float scale) {
  const int query = blockIdx.x;
  const T* q = head_rows(qkv, 3, 0, seq_len, head_size)[query];
  const HeadRows<const T> k = head_rows(qkv, 3, 1, seq_len, head_size);
  dot_rows(matrix_row(scores, seq_len, query), query + 1, q, k, scale);
}

// The block turns scores into probabilities, in place. Each thread does so with the scores that it has written. Returns
// log Σ eˢ.
__device__ inline float softmax(float* row, int count) {
  __shared__ float scratch[2][32];
  float maximum = -INFINITY, sum = 0;
  for (int j = threadIdx.x; j < count; j += blockDim.x) maximum = fmaxf(maximum, row[j]);
  maximum = block_reduce_max(maximum, scratch[0]);
  for (int j = threadIdx.x; j < count; j += blockDim.x) sum += row[j] = expf(row[j] - maximum);
  sum = block_reduce_sum(sum, scratch[1]);
  for (int j = threadIdx.x; j < count; j += blockDim.x) row[j] /= sum;
  return maximum + logf(sum);
}

__global__ void softmax_kernel(float* scores, float* lse, int seq_len) {
  const int query = blockIdx.x;
  const float log_sum = softmax(matrix_row(scores, seq_len, query), query + 1);
  if (threadIdx.x == 0) head_statistics(lse, seq_len)[query] = log_sum;
}

template <class T>
__global__ void weighted_sum_kernel(T* out, const float* p, const T* qkv, int seq_len, int head_size) {
  const int query = blockIdx.x;
  const HeadRows<const T> v = head_rows(qkv, 3, 2, seq_len, head_size);
  sum_rows(head_rows(out, 1, 0, seq_len, head_size)[query], matrix_row(p, seq_len, query), query + 1, v, 1);
}

template <class T>
void three_kernels(AttentionForward<T>& o, cudaStream_t stream) {
  const dim3 grid = o.grid(o.seq_len);
  scores_kernel<T><<<grid, row_threads, 0, stream>>>(o.scores.data(), o.qkv.data(), o.seq_len, o.head_size, o.scale);
  softmax_kernel<<<grid, row_threads, 0, stream>>>(o.scores.data(), o.lse.data(), o.seq_len);
  weighted_sum_kernel<T><<<grid, row_threads, 0, stream>>>(o.out.data(), o.scores.data(), o.qkv.data(), o.seq_len,
                                                           o.head_size);
}

// ---- 2: a row of the matrix in shared memory
//
// The three kernels become one, which works on one row of the matrix at a time. Its 4·T bytes fit into shared memory,
// and the 28 bytes per pair no longer go to memory and back. That is only 4 % of the bytes counted, but the part that
// L1 can't help with. The price: T is limited (to 58,000 on Hopper), and a block waits for its slowest thread three
// times per row instead of twice.

template <class T>
__global__ void row_in_shared_memory_kernel(T* out, float* lse, const T* qkv, int seq_len, int head_size, float scale) {
  extern __shared__ float row[];
  const int query = blockIdx.x;
  const auto [q, k, v] = qkv_rows(qkv, seq_len, head_size);
  dot_rows(row, query + 1, q[query], k, scale);
  const float log_sum = softmax(row, query + 1);
  if (threadIdx.x == 0) head_statistics(lse, seq_len)[query] = log_sum;
  __syncthreads();
  sum_rows(head_rows(out, 1, 0, seq_len, head_size)[query], row, query + 1, v, 1);
}

template <class T>
bool row_fits(const AttentionForward<T>& o) {
  constexpr int scratch_bytes = 2 * 32 * sizeof(float);  // of softmax
  return fits_shared_memory(o.seq_len * int(sizeof(float)) + scratch_bytes);
}

template <class T>
void row_in_shared_memory(AttentionForward<T>& o, cudaStream_t stream) {
  const int bytes = o.seq_len * int(sizeof(float));
  allow_shared_memory(row_in_shared_memory_kernel<T>, bytes);
  row_in_shared_memory_kernel<T><<<o.grid(o.seq_len), row_threads, bytes, stream>>>(
      o.out.data(), o.lse.data(), o.qkv.data(), o.seq_len, o.head_size, o.scale);
}

// ---- 3: a running maximum instead of a row
//
// With a maximum and a sum that are corrected at each key (arXiv:1805.02867) no row has to be kept. A warp has one
// query, and keeps its q and its sums in registers: T is not limited, and neither shared memory nor a barrier is
// needed. The 32 threads of a warp (its lanes) read neighbouring elements of a head, so sectors are full: a pair reads
// its key and its value, 256 bytes; counted, a ninth of rung 2. Now instructions are wasted: 5 shuffles and 2
// exponentials in all 32 lanes for 4 multiply-adds.

template <int N, class T>
__global__ void running_maximum_kernel(T* out, float* lse, const T* qkv, int seq_len, int head_size, float scale) {
  const int query = warp_row();
  if (query >= seq_len) return;
  const auto [q_rows, k_rows, v_rows] = qkv_rows(qkv, seq_len, head_size);
  float q[N], o[N] = {}, maximum = -INFINITY, sum = 0;
  load_lane(q, q_rows[query], head_size);
  for (int key = 0; key <= query; ++key) {
    float k[N], v[N];
    load_lane(k, k_rows[key], head_size);
    load_lane(v, v_rows[key], head_size);
    const float score = scale * warp_dot(q, k), new_maximum = fmaxf(maximum, score);
    const float correction = expf(maximum - new_maximum), p = expf(score - new_maximum);
    maximum = new_maximum;
    sum = sum * correction + p;
#pragma unroll
    for (float& x : o) x *= correction;
    add_lane(o, p, v);
  }
  store_lane(head_rows(out, 1, 0, seq_len, head_size)[query], o, head_size, 1.0f / sum);
  if (threadIdx.x % 32 == 0) head_statistics(lse, seq_len)[query] = maximum + logf(sum);
}

template <class T>
void running_maximum(AttentionForward<T>& o, cudaStream_t stream) {
  with_lane_elements(o.head_size, [&](auto n) {
    running_maximum_kernel<decltype(n)::value, T><<<o.grid(warp_blocks(o.seq_len)), 32 * warps_per_block, 0, stream>>>(
        o.out.data(), o.lse.data(), o.qkv.data(), o.seq_len, o.head_size, o.scale);
  });
}

// ---- 4: tiles of keys in shared memory: FlashAttention
//
// 64 queries see the same keys, so a block loads a tile of 32 keys once for all of them: 4 bytes per pair instead of
// 256. With the queries' own rows that is, counted, a 29th. A thread has a query for itself: no product is summed over
// lanes, no shuffle is needed, and sums are corrected once per tile. A pair takes 128 multiply-adds, 4 instructions of
// a warp: at best the 67 TFLOP/s that an H100 does without tensor cores. The model runs this in fp32.

template <class T>
void tiles(AttentionForward<T>& o, cudaStream_t stream) {
  const dim3 grid = o.grid(ceil_div(o.seq_len, attention_rows));
  with_tile_sizes<T>(o.head_size, [&](auto size, auto width) {
    attention_forward_kernel<T, decltype(size)::value, decltype(width)::value><<<grid, attention_rows, 0, stream>>>(
        o.heads_in(o.out.data()), o.lse.data(), o.template qkv_heads_in<const T>(o.qkv.data()), o.sizes(), o.scale, Unseen());
  });
}

// ---- 5: the products on tensor cores
//
// An mma does 2,048 multiply-adds, 16 elements of the head for 16 × 8 pairs: a sixteenth of an instruction per pair.
// Its operands are loaded by ldmatrix, 16 bytes per lane and without bank conflicts: counted, 258 wavefronts for 1,000
// elements instead of 10,200 (of loads of 4 bytes; nvcc may join four of them). 128 queries share a key, 2 bytes per
// pair, and the next tile is copied while this one is used. The model runs this in 16 bits
// (kernels/attention/flash_attention.cuh).

template <class T>
void tensor_cores(AttentionForward<T>& o, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2)
    flash_attention_forward(o.heads_in(o.out.data()), o.lse.data(), o.template qkv_heads_in<const T>(o.qkv.data()),
                            o.sizes(), stream);
}

// ---- 6: Hopper's copy engine and asynchronous tensor cores
//
// An instruction of 4 warps, wgmma, does 64 × 128 pairs for 16 elements of the head, and reads its operands from shared
// memory by itself: a 64th of the instructions of mma, and no ldmatrix. The copy engine brings whole tiles, for which
// one thread asks. So threads are left with the softmax, and two groups of warps take turns: while one computes its
// exponentials, the products of the other run, and its own of the tile before (extensions/hopper/kernels/hopper_attention.cuh).

template <class T>
void hopper(AttentionForward<T>& o, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2)
    hopper_attention_forward(o.heads_in(o.out.data()), o.lse.data(), o.template qkv_heads_in<const T>(o.qkv.data()),
                             o.sizes(), stream);
}

// ---- a library, which the model prefers where it is compiled in

template <class T>
void library(AttentionForward<T>& o, cudaStream_t stream) {
  attention_forward<T>(o.out, o.lse, o.qkv, o.batch, o.seq_len, o.heads, o.head_size, stream);
}

template <class T>
std::vector<Rung<AttentionForward<T>>> AttentionForward<T>::rungs() {
  return {
      {"three_kernels", "the formula: scores, softmax and sums, a T×T matrix between them", three_kernels<T>},
      {"row_in_shared_memory", "one kernel: a row of the matrix never leaves the SM", row_in_shared_memory<T>,
       row_fits},
      {"running_maximum", "no row at all: one warp per query, sums corrected with each key", running_maximum<T>},
      {"tiles", "kernels/attention/attention.cuh: 64 queries share each key that is read", tiles<T>},
      {"tensor_cores", "kernels/attention/flash_attention.cuh: mma, a tile ahead, 128 queries", tensor_cores<T>,
       suits_tensor_cores},
      {"hopper", "extensions/hopper/kernels/hopper_attention.cuh: wgmma, copy engine, softmax under products", hopper<T>, suits_hopper},
      {"library", "attention_forward by cuDNN", library<T>, suits_library, true},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<AttentionForward>(count, arguments); }
