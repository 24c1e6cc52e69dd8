// The shape of a matrix product: D (m,n) = alpha · op(A) (m,k) · op(B) (k,n) (kernels/matmul.cuh), and operands in eight
// bits.
#pragma once

#include <compare>
#include <cstddef>

// On GPUs (kernels/gemm/cublaslt.h): what NVIDIA recommends for Hopper.
constexpr size_t gpu_gemm_workspace_bytes = 32 << 20;

struct GemmShape {
  int m, n, k;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  bool fast_sums = false;  // of eight bits: tensor cores may keep sums in fewer bits than float (kernels/matmul.cuh)
  float alpha = 1;
  auto operator<=>(const GemmShape&) const = default;
};

enum class Fp8Format { e4m3, e5m2 };

// A matrix in eight bits, in device memory: element = code · *unit (kernels/fp8.cuh).
struct Fp8Matrix {
  const void* codes;
  Fp8Format format;
  const float* unit;
};
