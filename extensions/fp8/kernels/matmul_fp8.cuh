// Products of operands in eight bits (fp8.cuh; cards from 8.9 on). They have the one form that all of these cards multiply, both with
// neighbours along the sum:
//
//   gemm_fp8(d, a, b, bias, shape, stream):   D (m,n) = unit_a · unit_b · A (m,k) · B (n,k)ᵀ  [+ bias (n)]  [+ D]
//
// n and k are multiples of 16; bias is in bf16, D in bf16 or fp32. The sum is rounded once, when units, bias and D are
// in it. Hopper's tensor cores add eight-bit products in fewer bits than a float has (DeepSeek-V3, arXiv:2412.19437,
// section 3.3.2). Forward accepts that (fast_sums), because each operand is off by up to 2^-4 of itself already;
// gradients, which are sums over thousands of rows, are added to a float every few products, which takes some time.
// For one scale per matrix, other libraries choose the same: Transformer Engine (_2X_ACC_FPROP, _DGRAD and _WGRAD in
// transformer_engine/pytorch/module/base.py; Float8CurrentScaling in transformer_engine/common/recipe/__init__.py) and
// torchao (use_fast_accum of Float8LinearConfig in torchao/float8/config.py). With scales for tiles Transformer Engine adds
// to a float in all products, with scales for rows torchao in none. The CPU device adds in float, or, to imitate such a
// card, in as many bits as Hopper has (cpu/tensor_core_sums.h).
//
// Units of tiles and blocks have the layout of cuBLASLt's documentation ("128-element 1D and 128x128 2D Block Scaling"): m
// and n are multiples of 4, at most one of the operands has units of blocks, and k need not be a multiple of 128.
#pragma once

#include <stdexcept>
#include <string>

#include "kernels/matmul.cuh"

// The product of two matrices in eight bits.
template <class Out>
void matmul_fp8(const char* name, Out* d, const Fp8Matrix& a, const Fp8Matrix& b, const __nv_bfloat16* bias,
                const GemmShape& s, cudaStream_t stream) {
  KernelRange range(name, stream, product_counts(s, 1, sizeof(Out)), {{d, size_t(s.m) * s.n, s.accumulate}});
  for (const float* unit : {a.unit, b.unit})
    if (reinterpret_cast<uintptr_t>(unit) % fp8_unit_alignment != 0)
      throw std::logic_error(std::string(name) + ": the unit of a matrix in eight bits lies at no multiple of 16 bytes");
  gemm_fp8(d, a, b, bias, s, stream);
}
