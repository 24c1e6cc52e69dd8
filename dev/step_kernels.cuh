// The operations of a training step in bf16 that our own kernels do, at the shapes that are timed on a GPU. launches.cu rehearses
// them for their grids, step_kernels.cu compiles them for their machine code; machine_code.py reads both.
#pragma once

#include "extensions/fp8/kernels/fp8.cuh"
#include "kernels/adamw.cuh"
#include "kernels/attention/attention.cuh"
#include "kernels/column_sum.cuh"
#include "kernels/cross_entropy.cuh"
#include "kernels/embedding.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/norm.cuh"

struct Shape {
  const char* name;
  int B, T, L, NH, C, V;
};
constexpr Shape shapes[] = {{"gpt2", 64, 1024, 12, 12, 768, 50257}, {"gpt2-xl", 16, 1024, 48, 25, 1600, 50257}};
constexpr int most_logit_rows = 16384;  // --logit-chunks 0

// An address without memory. It is aligned for any launcher.
template <class T>
T* nowhere() {
  return reinterpret_cast<T*>(size_t(1) << 40);
}

// Calls add(calls in a step of one micro-batch, elements, function) for each operation. `elements` is the size of its
// largest tensor; the function launches it.
template <class Add>
void for_each_operation(const Shape& shape, Add add) {
  using Float = __nv_bfloat16;
  const auto [name, B, T, L, NH, C, V] = shape;
  const int R = B * T, padded = round_up(V, 128), chunks = ceil_div(R, most_logit_rows), logit_rows = ceil_div(R, chunks);
  const size_t block = 12 * size_t(C) * C + 13 * size_t(C), partials = (L + 2) * partial_sums<float>(block);
  const double rows = R, row = C;
  Float* const x = nowhere<Float>();
  float* const f = nowhere<float>();
  int* const i = nowhere<int>();
  const cudaStream_t stream = nullptr;
  add(1, rows * row, [&] { embedding_forward<Float>(x, i, x, x, {0, V}, neighbours(T), 0, R, C, stream); });
  add(2 * L + 1, rows * row, [&] { residual_layernorm_forward<Float>(x, x, f, f, x, x, x, x, R, C, stream); });
  add(L, rows * row, [&] { attention_forward<Float>(x, f, x, B, T, NH, C / NH, stream); });
  add(chunks, double(logit_rows) * padded, [&] { cross_entropy(x, f, f, i, logit_rows, V, padded, 1, f, true, stream); });
  add(2 * L + 1, rows * row, [&] { layernorm_backward<Float>(x, f, f, x, x, x, f, f, R, C, false, f, stream); });
  add(L, rows * row, [&] { attention_backward<Float>(x, f, x, x, x, f, B, T, NH, C / NH, stream); });
  // Kernels for missing epilogues of cuBLASLt: GELU, and the column sums of a bias's gradient.
  add(L, 4 * rows * row, [&] { gelu_forward(x, x, R, 4 * C, stream); });
  add(L, 4 * rows * row, [&] { gelu_backward(x, x, R, 4 * C, stream); });
  add(L, 4 * rows * row, [&] { column_sum<Float>(f, x, R, 4 * C, false, f, stream); });
  add(1, rows * row, [&] { embedding_backward<Float>(f, f, i, i, x, {0, V}, B, neighbours(T), T, C, false, f, stream); });
  add(L, double(block), [&] { square_sums(f, f, block, stream); });
  add(1, double(partials), [&] { add_up(nowhere<double>(), f, partials, stream); });
  add(1, 1, [&] { clip_factor(nowhere<GradientSummary>(), nowhere<double>(), f, 1, {}, stream); });
  add(1, 1, [&] { adamw_count(nowhere<AdamWState>(), f, {}, stream); });
  // Launched only with --fp8: they are not in the sum of a step.
  const Fp8Cast codes = {nowhere<uint8_t>(), Fp8Format::e4m3, nowhere<Fp8Scale>()};
  add(0, 4 * rows * row, [&] { fp8_maximum(f, x, size_t(R) * 4 * C, stream); });
  add(0, 4 * rows * row, [&] { cast_fp8(codes, x, size_t(R) * 4 * C, stream); });
  add(0, 4 * rows * row, [&] { cast_transpose_fp8(codes, codes.codes, x, R, 4 * C, stream); });
  add(0, 4 * rows * row, [&] { transpose_fp8(nowhere<uint8_t>(), nowhere<uint8_t>(), codes.format, R, 4 * C, stream); });
  add(0, rows * row, [&] { residual_layernorm_forward<Float>(x, x, f, f, x, x, x, x, R, C, stream, f); });
  add(0, rows * row, [&] { attention_forward<Float>(x, f, x, B, T, NH, C / NH, stream, {}, f); });
  add(0, rows * row, [&] { layernorm_backward<Float>(x, f, f, x, x, x, f, f, R, C, false, f, stream, f); });
  add(0, rows * row, [&] { attention_backward<Float>(x, f, x, x, x, f, B, T, NH, C / NH, stream, {}, f); });
  add(0, 4 * rows * row, [&] { gelu_forward(x, x, R, 4 * C, stream, f); });
  add(0, 4 * rows * row, [&] { gelu_backward(x, x, R, 4 * C, stream, f); });
  add(L, double(block), [&] { adamw(x, f, f, f, f, f, nowhere<AdamWState>(), block, block, {}, stream); });
}
