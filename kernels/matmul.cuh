// Matrix products: the only operation with two implementations (kernels/library_gemm.h), kernels/cublaslt/gemm.h
// (cuBLASLt) in a GPU build and cpu/gemm.h (oneDNN) on the CPU device. Both offer
//
//   gemm(d, a, b, bias, shape, stream):   D (m,n) = op(A) (m,k) · op(B) (k,n)  [+ bias (n)]  [+ D]
//
// All matrices are row-major; op transposes a matrix or leaves it as it is; sums are in float. A, B and bias are T. D
// is T, or float for weight gradients. use_gemm_workspace() gives the library gemm_workspace_bytes of device memory;
// null takes them away again, and then the library allocates its own. gemm_library() is the name of library and device.
// There are also
//
//   gemm_gelu(d, before, a, b, bias, ...):            before = A·B + bias,  D = gelu(before)
//   gemm_gelu_gradient(d, before, a, b, ...):         D = A·B ⊙ gelu'(before)
//   gemm_column_sums(d, sums, a, b, ...):             D = op(A)·B [+ D],  sums (n) of B's columns, in float
//
// which save a pass over memory. They return false, and do nothing, if they can't do a shape, or if
// gemm_has_epilogues<T> is false. Each is used where it is faster than a product and a separate kernel: both ways are
// timed once (kernels/gemm_choices.cuh).
//
// FLOPs 2·m·n·k; moves at least m·k + k·n elements in and m·n out.
//
// Linear layers store their weight as (in, out), as Hugging Face's GPT-2 does:
//   forward y = x·W + b;   backward dx = dy·Wᵀ,  dW = xᵀ·dy,  db = Σ_rows dy
// The output head uses the token embedding (V, C) transposed: logits = x·wteᵀ.
#pragma once

#include <string>

#include "kernels/column_sum.cuh"
#include "kernels/device/common.cuh"
#include "kernels/gelu.cuh"
#include "kernels/gemm_choices.cuh"

struct GemmShape {
  int m, n, k;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  auto operator<=>(const GemmShape&) const = default;
};

#include "kernels/library_gemm.h"  // which uses GemmShape

// Calls fused() or separate(), which do the same work on matrices of T, whichever is faster. `name` stands for the
// work.
template <class T, class Fused, class Separate>
void fused_or_separate(const char* name, const GemmShape& shape, Fused fused, Separate separate, cudaStream_t stream) {
  if (!gemm_has_epilogues<T>) return separate();
  std::string full_name = std::string(name) + ' ' + dtype_name<T>;
  for (int size : {shape.m, shape.n, shape.k}) full_name += ' ' + std::to_string(size);
  bool fuse;
  {
    const Untimed untimed(shape.accumulate);  // timing would repeat the work, and add to D more than once
    fuse = fusing_is_faster(full_name, fused, separate, stream);
  }
  if (fuse && fused()) return;
  const Untimed untimed(fuse);  // only this rank can't fuse: the others would not enter the collective of a new choice
  separate();
}

template <class T, class Out>
void matmul(const char* name, Out* d, const T* a, const T* b, const T* bias, const GemmShape& s, cudaStream_t stream) {
  const double m = s.m, n = s.n, k = s.k;
  KernelRange range(name, stream, (m * k + k * n) * sizeof(T) + m * n * sizeof(Out) * (s.accumulate ? 2 : 1),
                    2 * m * n * k);
  range.writes(d, size_t(s.m) * s.n, s.accumulate);
  gemm(d, a, b, bias, s, stream);
}

// out (rows, outputs) = x (rows, inputs) · weight (inputs, outputs) + bias (outputs)
template <class T>
void linear_forward(T* out, const T* x, const T* weight, const T* bias, int rows, int inputs, int outputs,
                    cudaStream_t stream) {
  matmul("matmul_forward", out, x, weight, bias, {rows, outputs, inputs}, stream);
}

// out = gelu(before), before = x·weight + bias; both (rows, outputs)
template <class T>
void linear_gelu_forward(T* out, T* before, const T* x, const T* weight, const T* bias, int rows, int inputs, int outputs,
                         cudaStream_t stream) {
  const GemmShape shape = {rows, outputs, inputs};
  const auto separate = [&] {
    linear_forward(before, x, weight, bias, rows, inputs, outputs, stream);
    gelu_forward(out, before, rows, outputs, stream);
  };
  const auto fused = [&] {
    const double m = rows, n = outputs, k = inputs;
    KernelRange range("matmul_gelu_forward", stream, (m * k + k * n + 2 * m * n) * sizeof(T), 2 * m * n * k);
    if (!gemm_gelu(out, before, x, weight, bias, shape, stream)) return false;
    range.writes(out, size_t(rows) * outputs);
    range.writes(before, size_t(rows) * outputs);
    return true;
  };
  fused_or_separate<T>("gelu", shape, fused, separate, stream);
}

// dx (rows, inputs) = dout (rows, outputs)·weightᵀ. If the layer's input is gelu(before_gelu), dx is also multiplied by
// gelu'(before_gelu); null: it is not.
template <class T>
void input_gradient(T* dx, const T* dout, const T* weight, const T* before_gelu, int rows, int inputs, int outputs,
                    cudaStream_t stream) {
  const T* no_bias = nullptr;
  const GemmShape shape = {.m = rows, .n = inputs, .k = outputs, .transpose_b = true};
  const auto separate = [&] {
    matmul("matmul_input_gradient", dx, dout, weight, no_bias, shape, stream);
    if (before_gelu) gelu_backward(dx, before_gelu, rows, inputs, stream);
  };
  if (!before_gelu) return separate();
  const auto fused = [&] {
    const double m = rows, n = inputs, k = outputs;
    KernelRange range("matmul_gelu_gradient", stream, (m * k + k * n + 2 * m * n) * sizeof(T), 2 * m * n * k);
    if (!gemm_gelu_gradient(dx, before_gelu, dout, weight, shape, stream)) return false;
    range.writes(dx, size_t(rows) * inputs);
    return true;
  };
  fused_or_separate<T>("gelu gradient", shape, fused, separate, stream);
}

// Floats of workspace that linear_backward needs.
inline size_t linear_workspace(int rows, int outputs) {
  return std::max(column_sum_workspace(rows, outputs), size_t(outputs));
}

// dweight (inputs, outputs) = xᵀ·dout, dbias (outputs) = Σ_rows dout, or += if `accumulate`.
template <class T>
void weight_gradient(float* dweight, float* dbias, const T* dout, const T* x, int rows, int inputs, int outputs,
                     bool accumulate, float* workspace, cudaStream_t stream) {
  const T* no_bias = nullptr;
  const GemmShape shape = {.m = inputs, .n = outputs, .k = rows, .transpose_a = true, .accumulate = accumulate};
  const auto separate = [&] {
    matmul("matmul_weight_gradient", dweight, x, dout, no_bias, shape, stream);
    column_sum(dbias, dout, rows, outputs, accumulate, workspace, stream);
  };
  const auto fused = [&] {
    const double m = inputs, n = outputs, k = rows;
    KernelRange range("matmul_bias_gradient", stream,
                      (m * k + k * n) * sizeof(T) + m * n * sizeof(float) * (accumulate ? 2 : 1), 2 * m * n * k);
    float* sums = accumulate ? workspace : dbias;
    if (!gemm_column_sums(dweight, sums, x, dout, shape, stream)) return false;
    if (accumulate) column_sum_level<float>(dbias, sums, 1, outputs, accumulate, nullptr, stream);
    range.writes(dweight, size_t(inputs) * outputs, accumulate);
    range.writes(dbias, outputs, accumulate);
    return true;
  };
  fused_or_separate<T>("bias gradient", shape, fused, separate, stream);
}

// Computes dx, dweight and dbias as above. workspace: linear_workspace(rows, outputs) floats.
template <class T>
void linear_backward(T* dx, float* dweight, float* dbias, const T* dout, const T* x, const T* weight, const T* before_gelu,
                     int rows, int inputs, int outputs, bool accumulate, float* workspace, cudaStream_t stream) {
  weight_gradient(dweight, dbias, dout, x, rows, inputs, outputs, accumulate, workspace, stream);
  input_gradient(dx, dout, weight, before_gelu, rows, inputs, outputs, stream);
}

// logits (rows, padded) = x (rows, C) · wte (padded, C)ᵀ
template <class T>
void head_forward(T* logits, const T* x, const T* wte, int rows, int channels, int padded, cudaStream_t stream) {
  const T* no_bias = nullptr;
  matmul("matmul_forward", logits, x, wte, no_bias, {.m = rows, .n = padded, .k = channels, .transpose_b = true}, stream);
}

// dx (rows, C) = dlogits·wte; dwte (padded, C) = dlogitsᵀ·x, or += if `accumulate`
template <class T>
void head_backward(T* dx, float* dwte, const T* dlogits, const T* x, const T* wte, int rows, int channels, int padded,
                   bool accumulate, cudaStream_t stream) {
  const T* no_bias = nullptr;
  matmul("matmul_weight_gradient", dwte, dlogits, x, no_bias,
         {.m = padded, .n = channels, .k = rows, .transpose_a = true, .accumulate = accumulate}, stream);
  matmul("matmul_input_gradient", dx, dlogits, wte, no_bias, {.m = rows, .n = channels, .k = padded}, stream);
}
