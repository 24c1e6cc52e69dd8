// Token and position embedding: out[row,:] = wte[tokens[row],:] + wpe[position of the row,:].
//
// Ranks may share the rows of wte (Megatron-LM: Shoeybi et al., arXiv:1909.08053). Then each adds zeros for tokens that
// it does not have, one of them adds the positions, and the sum over the ranks is the result. In backward each has the
// gradient of its own rows of wte, and the whole gradient of wpe.
//
// Backward adds dout (B·T,C) to the rows of two gradients. It never adds floats atomically, so the bits never depend on
// timing:
//   wte: the host sorts the rows b·T+t by token, with a stable sort (sort_by_token). Rows of the same token then form a
//        run. Runs are as uneven as word frequencies, and the longest is a twentieth of all tokens. So a block has 64
//        rows in this order, whatever their tokens are, and adds up its part of each run. A run that began in an
//        earlier block gives a partial sum; a second kernel adds the partial sums of a run.
//   wpe: one thread owns a pack of columns of one position and adds over b.
// A thread handles a pack of columns, so that neighbouring threads read neighbouring bytes.
// Forward moves 3·B·T·C elements (two reads, one write); backward reads dout twice and reads and writes touched rows.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/counts.h"
#include "kernels/device/common.cuh"
#include "kernels/device/part.h"
#include "kernels/positions.h"

// One block per row.
template <class Float, int N>
__global__ void embedding_forward_kernel(Float* out, const int* tokens, const Float* wte, const Float* wpe,
                                         VocabularyShard shard, Positions positions, int first_row, int channels) {
  const int row = blockIdx.x, token = tokens[row];
  const bool has_token = shard.has(token);
  const size_t token_row = size_t(token - shard.first) * channels;
  const size_t position_row = size_t(positions.of_row(first_row + row)) * channels;
  for (int column = threadIdx.x * N; column < channels; column += blockDim.x * N) {
    PackWords<Float, N> of_token = {}, of_position = {};
    if (has_token) of_token = load_pack<N>(wte + token_row + column);
    if (wpe) of_position = load_pack<N>(wpe + position_row + column);
    float x[N], y[N];
    unpack(of_token, x);
    unpack(of_position, y);
    add(x, y);
    store(out + size_t(row) * channels + column, x);
  }
}

constexpr int embedding_rows = 64;     // of a block in backward, in the order of their tokens
constexpr int embedding_at_once = 2 * packs_at_once;

// p[0..N) += x
template <int N>
__device__ inline void add_to(float* p, const float (&x)[N]) {
  float sum[N];
  load(p, sum);
  add(sum, x);
  store(p, sum);
}

// Does the first of this block's rows have the token of the row before it?
__device__ inline bool continues_run(const int* tokens, const int* order, int block) {
  return block > 0 && tokens[order[block * embedding_rows]] == tokens[order[block * embedding_rows - 1]];
}

// partials (blocks, C): of each block that continues a run, the sum of its part of it.
template <class Float, int N>
__global__ void token_embedding_backward_kernel(float* dwte, float* partials, const int* tokens, const int* order,
                                                const Float* dout, VocabularyShard shard, int rows, int channels) {
  __shared__ int row[embedding_rows], token[embedding_rows];
  const int first = blockIdx.x * embedding_rows, count = min(embedding_rows, rows - first);
  const bool continues = continues_run(tokens, order, blockIdx.x);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    row[i] = order[first + i];
    token[i] = tokens[row[i]];
  }
  __syncthreads();
  for (int column = threadIdx.x * N; column < channels; column += blockDim.x * N) {
    float sum[N] = {}, x[N];
    for (int begin = 0; begin < count; begin += embedding_at_once) {
      PackWords<Float, N> d[embedding_at_once] = {};
#pragma unroll
      for (int r = 0; r < embedding_at_once; ++r) {
        const int i = min(begin + r, count - 1);
        if (shard.has(token[i])) d[r] = load_pack<N>(dout + size_t(row[i]) * channels + column);
      }
#pragma unroll
      for (int r = 0; r < embedding_at_once; ++r) {
        const int i = begin + r;
        if (i >= count) break;
        unpack(d[r], x);
        add(sum, x);
        if (i + 1 < count && token[i + 1] == token[i]) continue;
        // The run ends here, or goes on in the next block.
        if (continues && token[i] == token[0]) store(partials + size_t(blockIdx.x) * channels + column, sum);
        else if (shard.has(token[i])) add_to(dwte + size_t(token[i] - shard.first) * channels + column, sum);
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] = 0;
      }
    }
  }
}

// Adds the partial sums of each run to its row. The first block that continues a run does this for the run.
template <int N>
__global__ void add_runs_kernel(float* dwte, const float* partials, const int* tokens, const int* order,
                                VocabularyShard shard, int channels) {
  __shared__ float scratch[32];
  const int block = blockIdx.x, blocks = gridDim.x, token = tokens[order[block * embedding_rows]];
  if (!shard.has(token) || !continues_run(tokens, order, block)) return;
  if (continues_run(tokens, order, block - 1) && tokens[order[(block - 1) * embedding_rows]] == token) return;
  int found = 0;  // blocks that begin with the token, from this one on: neighbours, as rows are sorted
#pragma unroll 4
  for (int other = block + threadIdx.x; other < blocks; other += blockDim.x)
    found += tokens[order[other * embedding_rows]] == token;
  const int end = block + int(block_reduce_sum(float(found), scratch));
  for (int column = threadIdx.x * N; column < channels; column += blockDim.x * N) {
    float sum[N] = {}, x[N];
#pragma unroll 8
    for (int part = block; part < end; ++part) {
      load(partials + size_t(part) * channels + column, x);
      add(sum, x);
    }
    add_to(dwte + size_t(token - shard.first) * channels + column, sum);
  }
}

template <class Float, int N>
__global__ void position_embedding_backward_kernel(float* dwpe, const Float* dout, int batch, Positions positions, int channels,
                                                   bool accumulate) {
  const int position = blockIdx.x, row = positions.row_at(position);
  for (int column = threadIdx.x * N; column < channels; column += blockDim.x * N) {
    float* out = dwpe + size_t(position) * channels + column;
    float sum[N] = {}, x[N];
    if (accumulate) load(out, sum);
    for (int first = 0; first < batch && row >= 0; first += embedding_at_once) {
      PackWords<Float, N> d[embedding_at_once];
#pragma unroll
      for (int r = 0; r < embedding_at_once; ++r) {
        const int b = min(first + r, batch - 1);
        d[r] = load_pack<N>(dout + (size_t(b) * positions.length + row) * channels + column);
      }
#pragma unroll
      for (int r = 0; r < embedding_at_once; ++r) {
        unpack(pack_if(first + r < batch, d[r]), x);
        add(sum, x);
      }
    }
    store(out, sum);
  }
}

// The threads of a block for a row of packs.
inline int embedding_threads(int packs) { return std::min(round_up(packs, 32), 256); }

// out (rows,C); tokens (rows) int32; wte (the shard's rows,C), wpe (P,C), which is null if positions are not to be
// added. These are rows first_row, first_row + 1, ... of a batch. Tokens that the shard does not have count as zero.
template <class Float>
void embedding_forward(Float* out, const int* tokens, const Float* wte, const Float* wpe, VocabularyShard shard,
                       Positions positions, int first_row, int rows, int channels, cudaStream_t stream) {
  const size_t count = size_t(rows) * channels;
  KernelRange range("embedding_forward", stream, embedding_forward_counts(double(count), sizeof(Float), wpe), {{out, count}});
  with_pack<Float>(channels, [&](auto N) {
    embedding_forward_kernel<Float, N><<<rows, embedding_threads(channels / N), 0, stream>>>(
        out, tokens, wte, wpe, shard, positions, first_row, channels);
  });
}

// order (count) = the rows 0..count-1 sorted by token, equal tokens in order of row. All in host memory.
// A counting sort, because the host does this for every batch.
inline void sort_by_token(const int* tokens, int count, int* order) {
  // next_position[v]: where in `order` the next token v goes
  std::vector<int> next_position(*std::max_element(tokens, tokens + count) + 2);
  for (int i = 0; i < count; ++i) ++next_position[tokens[i] + 1];
  std::partial_sum(next_position.begin(), next_position.end(), next_position.begin());
  for (int i = 0; i < count; ++i) order[next_position[tokens[i]]++] = i;
}

// Floats of workspace that embedding_backward needs.
inline size_t embedding_workspace(int rows, int channels) { return size_t(ceil_div(rows, embedding_rows)) * channels; }

// dwte (the shard's rows,C)[token of a row] += that row of dout (B·T,C), for tokens that the shard has. dwpe
// (P,C) = the sum of dout over the batch, 0 where no row stands, or += if `accumulate`. Gradients are float.
// tokens, order (B·T) are in device memory; sort_by_token makes order.
template <class Float>
void embedding_backward(float* dwte, float* dwpe, const int* tokens, const int* order, const Float* dout,
                        VocabularyShard shard, int batch, Positions positions, int wpe_rows, int channels, bool accumulate,
                        float* workspace, cudaStream_t stream) {
  const int rows = batch * positions.length;
  const size_t wpe_count = size_t(wpe_rows) * channels;
  const auto [bytes, flops] = embedding_backward_counts(double(rows) * channels, sizeof(Float));
  KernelRange range("embedding_backward", stream, {bytes + 4.0 * wpe_count, flops}, {{dwpe, wpe_count, accumulate}});
  with_pack<Float>(channels, [&](auto N) {
    const int blocks = ceil_div(rows, embedding_rows), threads = embedding_threads(channels / N);
    token_embedding_backward_kernel<Float, N>
        <<<blocks, threads, 0, stream>>>(dwte, workspace, tokens, order, dout, shard, rows, channels);
    position_embedding_backward_kernel<Float, N>
        <<<wpe_rows, threads, 0, stream>>>(dwpe, dout, batch, positions, channels, accumulate);
  });
  with_pack<float>(channels, [&](auto N) {
    add_runs_kernel<N><<<ceil_div(rows, embedding_rows), embedding_threads(channels / N), 0, stream>>>(
        dwte, workspace, tokens, order, shard, channels);
  });
}
