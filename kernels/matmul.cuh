// Matrix products: the only operation whose source differs between GPU and CPU device (kernels/gemm/library_gemm.h):
// kernels/gemm/cublaslt.h (cuBLASLt) and cpu/gemm.h (oneDNN). Both offer
//
//   gemm(d, a, b, bias, shape, stream):   D (m,n) = alpha · op(A) (m,k) · op(B) (k,n)  [+ bias (n)]  [+ D]
//
// All matrices are row-major; alpha is 1 where there is a bias; op transposes a matrix or leaves it as it is; sums are in
// fp32. A, B and bias have the storage type (Float); D has the storage type, or is fp32 (weight gradients).
// use_gemm_workspace() gives the library gemm_workspace_bytes of device memory; null takes them away again, and then the
// library allocates its own. gemm_library() is the name of library and device, if the library has several algorithms to
// choose from; else empty.
// There are also
//
//   gemm_gelu(d, before, a, b, bias, ...):            before = A·B + bias,  D = gelu(before)
//   gemm_gelu_gradient(d, before, a, b, ...):         D = A·B ⊙ gelu'(before)
//   gemm_column_sums(d, sums, a, b, ...):             D = op(A)·B [+ D],  sums (n) of B's columns, in float
//
// which save a pass over memory. They return false, and do nothing, if they can't do a shape, or if
// gemm_has_epilogues<Float> is false. Each is used where it is faster than a product and a separate kernel: both ways
// are timed in the rehearsal (kernels/gemm/gemm_choices.cuh).
//
// FLOPs 2·m·n·k; moves at least m·k + k·n elements in and m·n out.
#pragma once

#include <string>

#include "kernels/counts.h"
#include "kernels/device/common.cuh"
#include "kernels/gemm/gemm_choices.cuh"
#include "kernels/gemm/gemm_shape.h"
#include "kernels/gemm/library_gemm.h"

// Calls fused() or separate(), which do the same work on matrices of Float, whichever is faster. `name` stands for the
// work. fused() returns false, and does nothing, if the library can't do it.
template <class Float, class Fused, class Separate>
void fused_or_separate(const char* name, const GemmShape& shape, Fused fused, Separate separate, cudaStream_t stream) {
  if (!gemm_has_epilogues<Float>) return separate();
  std::string full_name = std::string(name) + ' ' + dtype_name<Float>;
  for (int size : {shape.m, shape.n, shape.k}) full_name += ' ' + std::to_string(size);
  if (!fusing_is_faster(full_name, fused, separate, stream) || !fused()) separate();
}

// w: bytes of an element of A and B; out: bytes of an element of D and of the extra output
inline BytesAndFlops product_counts(const GemmShape& s, double w, double out) {
  return product_counts(s.m, s.n, s.k, w, s.accumulate ? 2 * out : out);
}

template <class Float, class Out>
void matmul(const char* name, Out* d, const Float* a, const Float* b, const GemmShape& s, cudaStream_t stream,
            const Float* bias = nullptr) {
  KernelRange range(name, stream, product_counts(s, sizeof(Float), sizeof(Out)), {{d, size_t(s.m) * s.n, s.accumulate}});
  gemm(d, a, b, bias, s, stream);
}
