// Token and position embedding: out[row,:] = wte[tokens[row],:] + wpe[position of the row,:].
//
// Ranks may share the rows of wte (Megatron-LM: Shoeybi et al., arXiv:1909.08053). Then each adds zeros for tokens that
// it does not have, one of them adds the positions, and the sum over the ranks is the result. In backward each has the
// gradient of its own rows of wte, and that of wpe as a whole.
//
// Backward adds dout (B·T,C) to the rows of two tables. It never adds floats atomically, so the bits never depend on
// timing:
//   wte: the host sorts the rows b·T+t by token, with a stable sort (sort_by_token). Rows of the same token
//        then form a run. One block is launched per sorted row: the block at the start of a run adds up the whole
//        run, the others return at once. Runs are as uneven as word frequencies, and the longest (a twentieth of all
//        tokens) ends last, so a block loads eight rows at a time.
//   wpe: one thread owns a pack of columns of one position and adds over b.
// A thread handles a pack of columns, so that neighbouring threads read neighbouring bytes.
// Forward moves 3·B·T·C elements (two reads, one write); backward reads dout twice and reads and writes touched rows.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/device/common.cuh"
#include "kernels/device/part.h"
#include "kernels/positions.h"

template <class Float, int N>
__global__ void embedding_forward_kernel(Float* out, const int* tokens, const Float* wte, const Float* wpe,
                                         VocabularyShard shard, Positions positions, int first_row, size_t packs,
                                         int packs_per_row) {
  size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  size_t row = i / packs_per_row, column = i % packs_per_row * N, channels = size_t(packs_per_row) * N;
  float token[N] = {}, position[N] = {};
  if (shard.has(tokens[row])) load(wte + (tokens[row] - shard.first) * channels + column, token);
  if (wpe) load(wpe + positions.of_row(first_row + int(row)) * channels + column, position);
#pragma unroll
  for (int k = 0; k < N; ++k) token[k] += position[k];
  store(out + row * channels + column, token);
}

constexpr int embedding_rows_at_once = 8;

template <class Float, int N>
__global__ void token_embedding_backward_kernel(float* dwte, const int* tokens, const int* order, const Float* dout,
                                                VocabularyShard shard, int rows, int channels) {
  constexpr int rows_at_once = embedding_rows_at_once;
  const int first = blockIdx.x, token = tokens[order[first]];
  if (first > 0 && tokens[order[first - 1]] == token) return;
  if (!shard.has(token)) return;
  float* const out = dwte + size_t(token - shard.first) * channels;
  for (int column = threadIdx.x * N; column < channels; column += blockDim.x * N) {
    float sum[N], x[N];
    load(out + column, sum);
    // sum += dout[order[i]] for i = first, first + 1, ... while the token is the same. Several rows are loaded before
    // they are added. more: the last of them has this token, so the run may go on.
    bool more = true;
    for (int i = first; more; i += rows_at_once) {
      int row[rows_at_once];
      Pack<Float, N> d[rows_at_once] = {};  // rows after the run's end stay zero: adding them changes nothing
#pragma unroll
      for (int r = 0; r < rows_at_once; ++r) row[r] = order[min(i + r, rows - 1)];
#pragma unroll
      for (int r = 0; r < rows_at_once; ++r) {
        more = (i + r < rows) & (tokens[row[r]] == token);
        if (more) d[r] = load_pack<N>(dout + size_t(row[r]) * channels + column);
      }
#pragma unroll
      for (int r = 0; r < rows_at_once; ++r) {
        unpack(d[r], x);
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] += x[k];
      }
    }
    store(out + column, sum);
  }
}

template <class Float, int N>
__global__ void position_embedding_backward_kernel(float* dwpe, const Float* dout, int batch, Positions positions, int channels,
                                                   bool accumulate) {
  const int position = blockIdx.x, row = positions.row_at(position);
  for (int column = threadIdx.x * N; column < channels; column += blockDim.x * N) {
    float* out = dwpe + size_t(position) * channels + column;
    float sum[N] = {}, d[N];
    if (accumulate) load(out, sum);
    if (row >= 0)
      for (int b = 0; b < batch; ++b) {
        load(dout + (size_t(b) * positions.length + row) * channels + column, d);
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] += d[k];
      }
    store(out, sum);
  }
}

// out (rows,C); tokens (rows) int32; wte (the shard's rows,C), wpe (P,C), which is null if positions are not to be added.
// These are rows first_row, first_row + 1, ... of a batch. Tokens that the shard does not have count as zero.
template <class Float>
void embedding_forward(Float* out, const int* tokens, const Float* wte, const Float* wpe, VocabularyShard shard,
                       Positions positions, int first_row, int rows, int channels, cudaStream_t stream) {
  const size_t count = size_t(rows) * channels;
  KernelRange range("embedding_forward", stream, (wpe ? 3.0 : 2.0) * count * sizeof(Float), count);
  range.writes(out, count);
  with_pack<Float>(channels, [&](auto width) {
    constexpr int N = decltype(width)::value;
    const size_t packs = count / N;
    embedding_forward_kernel<Float, N><<<unsigned(ceil_div(packs, size_t(256))), 256, 0, stream>>>(
        out, tokens, wte, wpe, shard, positions, first_row, packs, channels / N);
  });
  CUDA_CHECK(cudaGetLastError());
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

// dwte (the shard's rows,C)[token of a row] += that row of dout (B·T,C), for tokens that the shard has. dwpe
// (P,C) = the sum of dout over the batch, 0 where no row stands, or += if `accumulate`. Gradients are float.
// tokens, order (B·T) are in device memory; sort_by_token makes order.
template <class Float>
void embedding_backward(float* dwte, float* dwpe, const int* tokens, const int* order, const Float* dout,
                        VocabularyShard shard, int batch, Positions positions, int wpe_rows, int channels, bool accumulate,
                        cudaStream_t stream) {
  const int rows = batch * positions.length;
  KernelRange range("embedding_backward", stream,
                    2.0 * rows * channels * (sizeof(Float) + sizeof(float)) + 4.0 * wpe_rows * channels,
                    2.0 * rows * channels);
  range.writes(dwpe, size_t(wpe_rows) * channels, accumulate);
  with_pack<Float>(channels, [&](auto width) {
    constexpr int N = decltype(width)::value;
    const int threads = std::min(round_up(channels / N, 32), 256);
    token_embedding_backward_kernel<Float, N><<<rows, threads, 0, stream>>>(dwte, tokens, order, dout, shard, rows,
                                                                            channels);
    position_embedding_backward_kernel<Float, N>
        <<<wpe_rows, threads, 0, stream>>>(dwpe, dout, batch, positions, channels, accumulate);
  });
  CUDA_CHECK(cudaGetLastError());
}
