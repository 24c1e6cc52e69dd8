// Bytes and FLOPs of the model's operations; the bytes are the least that must move through device memory. The formulas
// stand only here: launchers tell these numbers to profiles (kernels/device/profile.cuh), plans compute the time of a step
// from them, and ladders compare their rungs with them. The header comments of the kernels derive them.
//
// n: elements of the tensor that is written; w: bytes of an element in the storage type
#pragma once

#include "kernels/device/bytes.h"

constexpr BytesAndFlops embedding_forward_counts(double n, double w, bool has_positions = true) {
  return {(has_positions ? 3 : 2) * n * w, n};
}
// n: elements of the gradient that is read; the positions' rows are not counted
constexpr BytesAndFlops embedding_backward_counts(double n, double w) { return {2 * n * (w + 4), 2 * n}; }

// passes: tensors that are read and written; 2 where nothing is added before the norm
constexpr BytesAndFlops layernorm_forward_counts(double n, double w, double passes = 4) { return {passes * n * w, 8 * n}; }
constexpr BytesAndFlops layernorm_backward_counts(double n, double w, double passes = 4) { return {passes * n * w, 20 * n}; }

constexpr BytesAndFlops gelu_forward_counts(double n, double w) { return {2 * n * w, 10 * n}; }
constexpr BytesAndFlops gelu_backward_counts(double n, double w) { return {3 * n * w, 20 * n}; }

// n: logits, which become their gradients
constexpr BytesAndFlops cross_entropy_counts(double n, double w, bool with_gradient = true) {
  return {(with_gradient ? 2 : 1) * n * w, 6 * n};
}

// D (m,n) = A (m,k) · B (k,n). w: of A and B; out: bytes that move for each element of D
constexpr BytesAndFlops product_counts(double m, double n, double k, double w, double out) {
  return {(m * k + k * n) * w + m * n * out, 2 * m * n * k};
}

constexpr BytesAndFlops square_sums_counts(double n) { return {4 * n, 2 * n}; }

// w: bytes of a working weight; moment: bytes of each of the two moments; has_masters: 16-bit weights have master
// copies
constexpr BytesAndFlops adamw_counts(double n, double w, double moment = 4, bool has_masters = true) {
  return {(4 + 4 * moment + (w == 4 ? 8 : has_masters ? 10 : 4)) * n, 15 * n};
}
