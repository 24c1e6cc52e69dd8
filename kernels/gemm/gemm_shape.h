// The shape of a matrix product: D (m,n) = op(A) (m,k) · op(B) (k,n) (kernels/matmul.cuh).
#pragma once

#include <compare>
#include <cstddef>

// On GPUs (kernels/gemm/cublaslt.h): what NVIDIA recommends for Hopper.
constexpr size_t gpu_gemm_workspace_bytes = 32 << 20;

struct GemmShape {
  int m, n, k;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  auto operator<=>(const GemmShape&) const = default;
};
