// Which gradients travel as factors of low rank (low_rank.cuh), and how many numbers of each tensor then do.
#pragma once

#include "gpt/tensors.h"

constexpr int most_low_rank = 64;

// This rank's part of a tensor as a matrix, with its factors P (rank, rows) and Q (rank, columns). rank 0: the tensor
// travels as it is, because it is no matrix, or factors would be no fewer numbers.
struct LowRankShape {
  int rows, columns, rank;
  size_t p() const { return size_t(rank) * size_t(rows); }
  size_t q() const { return size_t(rank) * size_t(columns); }
};

// The result is the same on all ranks and stages, also on those that have no part of the tensor. Rows of wte are
// padded.
inline LowRankShape low_rank_shape(const TensorDescriptor& tensor, const TensorList& list, int rank) {
  if (!tensor.decays()) return {0, 0, 0};
  int sizes[2];
  for (int axis : {0, 1}) sizes[axis] = int(tensor.shape[size_t(axis)]) / (tensor.split.axis == axis ? list.tp() : 1);
  if (list.is_wte(tensor)) sizes[0] = list.vocabulary_rows();
  const auto [rows, columns] = sizes;
  return {rows, columns, size_t(rank) * size_t(rows + columns) < size_t(rows) * size_t(columns) ? rank : 0};
}
