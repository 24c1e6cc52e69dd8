// Rows whose heads are split between ranks (parallel/ulysses.cuh): what goes to rank n, or comes from it, in one piece.
//
//   split   (R, parts, N, c/N)  →  (N, R, parts, c/N)      rows of all heads to one message for each rank
//   join    (N, R, parts, c/N)  →  (R, parts, N, c/N)      and back
//
// parts: 3 for q, k and v beside each other, 1 for the output. Elementwise, one pack per thread; moves 2 elements per
// element.
#pragma once

#include "kernels/device/common.cuh"

// width: packs of a rank's heads in a row.
template <class Float, int N, bool split>
__global__ void move_heads_kernel(Float* out, const Float* input, size_t packs, size_t rows, int parts, int ranks,
                                  int width) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const size_t column = i % width, rank = i / width % ranks, row_and_part = i / width / ranks;
  const size_t in_messages = (rank * rows * parts + row_and_part) * width + column;
  float x[N];
  load(input + (split ? i : in_messages) * N, x);
  store(out + (split ? in_messages : i) * N, x);
}

template <bool split, class Float>
void move_heads(const char* name, Float* out, const Float* input, size_t rows, int parts, int channels, int ranks,
                cudaStream_t stream) {
  const size_t count = rows * parts * channels;
  KernelRange range(name, stream, 2.0 * count * sizeof(Float), 0);
  range.writes(out, count);
  with_pack<Float>(channels / ranks, [&](auto N) {
    move_heads_kernel<Float, N, split><<<pack_blocks(count / N), pack_block, 0, stream>>>(
        out, input, count / N, rows, parts, ranks, channels / ranks / N);
  });
}

// messages (ranks, rows, parts, channels/ranks) from tensor (rows, parts, channels).
template <class Float>
void split_heads(Float* messages, const Float* tensor, size_t rows, int parts, int channels, int ranks, cudaStream_t stream) {
  move_heads<true>("split_heads", messages, tensor, rows, parts, channels, ranks, stream);
}

// The way back.
template <class Float>
void join_heads(Float* tensor, const Float* messages, size_t rows, int parts, int channels, int ranks, cudaStream_t stream) {
  move_heads<false>("join_heads", tensor, messages, rows, parts, channels, ranks, stream);
}
