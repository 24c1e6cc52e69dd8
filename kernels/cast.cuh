// Casts between float and the storage type Float, for gradients that are sent to other ranks, and for weights.
//   cast         out = Float(in)                  moves 4 + sizeof(Float) bytes per element
//   accumulate   out = in, or out += in           moves 4 + sizeof(Float) bytes per element, 4 more when adding
// Elementwise, one pack of floats per thread; counts are multiples of the pack (units are padded).
#pragma once

#include "kernels/device/common.cuh"

// out = input, cast to Out, or out += input if `add`.
template <class Out, class In>
__global__ void cast_kernel(Out* out, const In* input, size_t count, bool add) {
  constexpr int N = pack_width<float>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float x[N], before[N] = {};
  load(input + i, x);
  if (add) load(out + i, before);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = add ? x[k] + before[k] : x[k];
  store(out + i, x);
}

// out (count) = input (count), cast to Float.
template <class Float>
void cast(Float* out, const float* input, size_t count, cudaStream_t stream) {
  KernelRange range("cast", stream, {(4.0 + sizeof(Float)) * count, 0}, {{out, count}});
  cast_kernel<Float, float><<<float_pack_blocks(count), pack_block, 0, stream>>>(out, input, count, false);
}

// out (count) = input (count) of type Float, or += if `add`.
template <class Float>
void accumulate(float* out, const Float* input, size_t count, bool add, cudaStream_t stream) {
  const BytesAndFlops counts = {(4.0 + sizeof(Float) + (add ? 4 : 0)) * count, add ? 1.0 * count : 0};
  KernelRange range("accumulate", stream, counts, {{out, count, add}});
  cast_kernel<float, Float><<<float_pack_blocks(count), pack_block, 0, stream>>>(out, input, count, add);
}
