// Linear layers, y = x·W + b, and the output head.
//
//   forward   y = x·W + b
//   backward  dx = dy·Wᵀ,  dW = xᵀ·dy,  db = Σ_rows dy
//
// W is stored as (inputs, outputs), as Hugging Face's GPT-2 does. The head uses the token embedding (V, C) transposed:
// logits = x·wteᵀ. Bytes and FLOPs are in the products (kernels/matmul.cuh).
//
// Where a product is followed by GELU, by GELU's gradient or by a sum of columns, there are two ways to compute both:
// in one call of the library, or in a product and a kernel. The faster one is taken (fused_or_separate).
#pragma once

#include "kernels/column_sum.cuh"
#include "kernels/gelu.cuh"
#include "kernels/matmul.cuh"

// out (rows, outputs) = x (rows, inputs) · weight (inputs, outputs) + bias (outputs)
template <class Float>
void linear_forward(Float* out, const Float* x, const Float* weight, const Float* bias, int rows, int inputs,
                    int outputs, cudaStream_t stream) {
  matmul("matmul_forward", out, x, weight, {rows, outputs, inputs}, stream, bias);
}

// out = gelu(before), before = x·weight + bias; both (rows, outputs)
template <class Float>
void linear_gelu_forward(Float* out, Float* before, const Float* x, const Float* weight, const Float* bias, int rows,
                         int inputs, int outputs, cudaStream_t stream) {
  const GemmShape shape = {rows, outputs, inputs};
  const auto fused = [&] {
    KernelRange range("matmul_gelu_forward", stream, product_counts(shape, sizeof(Float), 2 * sizeof(Float)));
    if (!gemm_gelu(out, before, x, weight, bias, shape, stream)) return false;
    for (const Float* written : {out, before}) range.writes(written, size_t(rows) * outputs);
    return true;
  };
  const auto separate = [&] {
    linear_forward(before, x, weight, bias, rows, inputs, outputs, stream);
    gelu_forward(out, before, rows, outputs, stream);
  };
  fused_or_separate<Float>("gelu", shape, fused, separate, stream);
}

// dx (rows, inputs) = dout (rows, outputs)·weightᵀ
template <class Float>
void linear_input_gradient(Float* dx, const Float* dout, const Float* weight, int rows, int inputs, int outputs,
                           cudaStream_t stream) {
  const GemmShape shape = {.m = rows, .n = inputs, .k = outputs, .transpose_b = true};
  matmul("matmul_input_gradient", dx, dout, weight, shape, stream);
}

// The same for a layer whose input is gelu(before): dbefore (rows, inputs) = dout·weightᵀ ⊙ gelu'(before)
template <class Float>
void linear_gelu_gradient(Float* dbefore, const Float* dout, const Float* weight, const Float* before, int rows,
                          int inputs, int outputs, cudaStream_t stream) {
  const GemmShape shape = {.m = rows, .n = inputs, .k = outputs, .transpose_b = true};
  const auto fused = [&] {
    KernelRange range("matmul_gelu_gradient", stream, product_counts(shape, sizeof(Float), 2 * sizeof(Float)));
    if (!gemm_gelu_gradient(dbefore, before, dout, weight, shape, stream)) return false;
    range.writes(dbefore, size_t(rows) * inputs);
    return true;
  };
  const auto separate = [&] {
    linear_input_gradient(dbefore, dout, weight, rows, inputs, outputs, stream);
    gelu_backward(dbefore, before, rows, inputs, stream);
  };
  fused_or_separate<Float>("gelu gradient", shape, fused, separate, stream);
}

// Floats of workspace that linear_weight_gradient needs.
inline size_t linear_workspace(int rows, int outputs) { return column_sum_workspace(rows, outputs); }

// dweight (inputs, outputs) = xᵀ·dout, dbias (outputs; null: none) = Σ_rows dout, or += if `accumulate`.
// workspace: linear_workspace(rows, outputs) floats.
template <class Float>
void linear_weight_gradient(float* dweight, float* dbias, const Float* dout, const Float* x, int rows, int inputs,
                            int outputs, bool accumulate, float* workspace, cudaStream_t stream) {
  const GemmShape shape = {.m = inputs, .n = outputs, .k = rows, .transpose_a = true, .accumulate = accumulate};
  const auto fused = [&] {
    KernelRange range("matmul_bias_gradient", stream, product_counts(shape, sizeof(Float), sizeof(float)));
    float* const new_sums = accumulate ? workspace : dbias;  // in the workspace until they are added
    if (!gemm_column_sums(dweight, new_sums, x, dout, shape, stream)) return false;
    if (accumulate) add_partial_sums({dbias, new_sums}, {}, 1, outputs, true, stream);
    range.writes(dweight, size_t(inputs) * outputs, accumulate);
    range.writes(dbias, size_t(outputs), accumulate);
    return true;
  };
  const auto separate = [&] {
    matmul("matmul_weight_gradient", dweight, x, dout, shape, stream);
    if (dbias) column_sum(dbias, dout, rows, outputs, accumulate, workspace, stream);
  };
  if (!dbias) return separate();
  fused_or_separate<Float>("bias gradient", shape, fused, separate, stream);
}

// logits (rows, padded) = x (rows, C) · wte (padded, C)ᵀ
template <class Float>
void head_forward(Float* logits, const Float* x, const Float* wte, int rows, int channels, int padded,
                  cudaStream_t stream) {
  matmul("matmul_forward", logits, x, wte, {.m = rows, .n = padded, .k = channels, .transpose_b = true}, stream);
}

// dx (rows, C) = dlogits·wte; dwte (padded, C; null: not wanted) = dlogitsᵀ·x, or += if `accumulate`
template <class Float>
void head_backward(Float* dx, float* dwte, const Float* dlogits, const Float* x, const Float* wte, int rows,
                   int channels, int padded, bool accumulate, cudaStream_t stream) {
  const GemmShape of_wte = {.m = padded, .n = channels, .k = rows, .transpose_a = true, .accumulate = accumulate};
  if (dwte) matmul("matmul_weight_gradient", dwte, dlogits, x, of_wte, stream);
  matmul("matmul_input_gradient", dx, dlogits, wte, {.m = rows, .n = channels, .k = padded}, stream);
}
