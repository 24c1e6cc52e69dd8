// Rows whose heads are split between ranks (extensions/context_parallel/ulysses.cuh): each rank's message is contiguous. A rank has a run of
// rows of each sample: T/N rows.
//
//   split_heads   (R, parts, N, c/N)  →  (N, R, parts, c/N)      rows of all heads to one message for each rank
//   join_heads    (N, R, parts, c/N)  →  (R, parts, N, c/N)      and back
//   join_runs     (N, B, run)  →  (B, N, run)                    messages from all ranks to all rows of own heads
//   split_runs    (B, N, run)  →  (N, B, run)                    and back
//
// parts: 3 for q, k and v beside each other, 1 for the output; run: the T/N · parts · c/N elements that a message has of
// a sample. So each of the four exchanges two axes. One pack per thread; moves 2 elements per element.
#pragma once

#include "kernels/device/common.cuh"
#include "kernels/device/maximum.cuh"

// out (second, first, width) from input (first, second, width). width: in packs.
template <class Float, int N, class Seen>
__global__ void swap_axes_kernel(Float* out, const Float* input, size_t packs, size_t first, size_t second, size_t width, Seen seen) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const size_t column = i % width, inner = i / width % second, outer = i / width / second;
  float x[N];
  load(input + i * N, x);
  store(out + ((inner * first + outer) * width + column) * N, x);
  seen.see(x);
  seen.raise();
}

// The same, under the name of one of the four. width: in elements; maximum: of out
template <class Float>
void swap_axes(const char* name, Float* out, const Float* input, size_t first, size_t second, size_t width,
               cudaStream_t stream, float* maximum = nullptr) {
  const size_t count = first * second * width;
  KernelRange range(name, stream, {2.0 * count * sizeof(Float), 0}, {{out, count}});
  with_pack<Float>(int(width % pack_block), maximum, [&](auto N, auto seen) {  // (a pack's length divides pack_block)
    swap_axes_kernel<Float, N>
        <<<pack_blocks(count / N), pack_block, 0, stream>>>(out, input, count / N, first, second, width / N, seen);
  });
}
