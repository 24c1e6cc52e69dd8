// Tensor parallelism (Shoeybi et al., arXiv:1909.08053) with sequence parallelism (Korthikanti et al.,
// arXiv:2205.05198).
//
// N ranks split the matrices of a layer: the first matrix of a pair by columns (qkv, up), the second one by rows
// (projection, down). So the activations between the two are split by columns, and no rank needs the others' columns.
// Around the pair all ranks need all rows, and each has computed one term of the result:
//
//   own rows of x  →  all_gather  →  x · A_j  →  f  →  · B_j  →  reduce_scatter  →  own rows of Σ_j f(x·A_j)·B_j
//   (R/N,C)           (R,C)          (R,4C/N)         (R,C)                       (R/N,C)
//
// Between reduce_scatter and the next all_gather stand LayerNorms and residual additions, which work on rows: each rank
// does its R/N rows. In backward all_gather and reduce_scatter change places.
//
// Communication hides behind the products. The rows are cut into K pieces, and while a piece is multiplied, the next
// one is gathered, or the last one reduced, on the communication stream. Each piece is cut over the ranks, so that
// gathered rows have their natural order:
//
//   rows 0..R of the batch    | piece 0: rank 0, rank 1 | piece 1: rank 0, rank 1 | ...
//   rows of rank 1            |          rows of piece 0, rows of piece 1, ...
//
// Bytes that a rank sends, for each gather and each scatter of (R,C): (N−1)/N · R·C · sizeof(Float)
// Its events are tested by test_tensor_parallel, test_meshes.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "gpt/collectives.cuh"
#include "gpt/shapes.h"
#include "kernels/device/memory.cuh"

// Cuts `rows`, a multiple of `ranks`, into at most `pieces` pieces of nearly equal length, which are multiples of
// `ranks`.
inline std::vector<Rows> cut_rows(int rows, int ranks, int pieces) {
  const int own = rows / ranks, count = std::min(pieces, std::max(own, 1));
  std::vector<Rows> cut;
  for (int piece = 0, first = 0; piece < count; ++piece) {
    const int end = int(int64_t(own) * (piece + 1) / count) * ranks;
    cut.push_back({first, end - first});
    first = end;
  }
  return cut;
}

template <class Float>
class TensorParallel {
 public:
  // ranks: two or more. The model runs on `stream`, and sends its rows in `pieces` pieces.
  TensorParallel(Communicator& ranks, int pieces, cudaStream_t stream)
      : ranks_(ranks), pieces_(pieces), stream_(stream) {}

  int size() const { return ranks_.size(); }
  int rank() const { return ranks_.rank(); }

  // rows, columns: of the largest matrix that is scattered
  void lay_out(Arena& arena, int rows, int columns) {
    exchange_ = arena.take<Float>(size_t(rows) * columns);
    zeros_ = arena.take<Float>(size_t(columns));
    columns_ = size_t(columns);
  }
  // To be called when memory has been allocated.
  void clear() {
    CUDA_CHECK(cudaMemsetAsync(zeros_, 0, columns_ * sizeof(Float), stream_));
  }

  // A matrix for rows on their way: the terms of sums, and rows that layers gather for a moment.
  Float* exchange() const { return exchange_; }
  // A bias that only one rank may add to a sum over the ranks: the others add zeros.
  const Float* once(const Float* bias) const { return rank() == 0 || !bias ? bias : zeros_; }

  // Gathers the rows of all ranks, and calls use(gathered, piece) for one piece of them after the other. own (rows/N,
  // columns): this rank's rows; buffer (rows, columns): where to gather, which is returned.
  template <class Use>
  const Float* gather_then(Float* buffer, const Float* own, int rows, int columns, Use use) {
    const std::vector<Rows> pieces = cut_rows(rows, size(), pieces_);
    const uint64_t first = ranks_.last() + 1;  // the numbers of the others follow it
    gather_pieces(buffer, own, columns, pieces);
    for (size_t k = 0; k < pieces.size(); ++k) {
      const TraceScope scope(int(k), false);
      ranks_.wait(stream_, first + k);
      use(static_cast<const Float*>(buffer), pieces[k]);
    }
    return buffer;
  }

  // The same without a product: one wait for all pieces.
  const Float* gather(Float* buffer, const Float* own, int rows, int columns) {
    gather_pieces(buffer, own, columns, cut_rows(rows, size(), pieces_));
    ranks_.wait(stream_, ranks_.last());
    return buffer;
  }

  // Gathers `count` values of each rank, one rank's after the other's, in `all`, which is returned.
  template <class E>
  E* gather_values(E* all, E* own, size_t count) {
    ranks_.after(stream_);
    ranks_.all_gather(all, own, count);
    ranks_.wait(stream_, ranks_.last());
    return all;
  }

  // Starts to gather. The rows are there after the next start_scatter().
  void start_gather(Float* buffer, const Float* own, int rows, int columns) {
    gather_pieces(buffer, own, columns, cut_rows(rows, size(), pieces_));
    gathered_ = ranks_.last();
  }

  // Adds up the terms of all ranks, each rank for its own rows. compute(out, piece) writes a piece of this rank's term
  // of the sum. own (rows/N, columns): the sum of this rank's rows, after finish_scatter(): until then the last pieces
  // are still being added. The rows of start_gather() are there before.
  template <class Compute>
  void start_scatter(Float* own, int rows, int columns, Compute compute) {
    const std::vector<Rows> pieces = cut_rows(rows, size(), pieces_);
    for (size_t k = 0; k < pieces.size(); ++k) {
      const TraceScope scope(int(k), true);
      compute(exchange_, pieces[k]);
      ranks_.after(stream_);
      const Rows rows_here = own_rows(pieces[k]);
      ranks_.reduce_scatter(rows_here.of(own, columns), static_cast<const Float*>(pieces[k].of(exchange_, columns)),
                            size_t(rows_here.count) * columns);
    }
    if (gathered_) ranks_.wait(stream_, std::exchange(gathered_, 0));
  }
  void finish_scatter() {
    ranks_.wait(stream_, ranks_.last());
  }
  template <class Compute>
  void then_scatter(Float* own, int rows, int columns, Compute compute) {
    start_scatter(own, rows, columns, compute);
    finish_scatter();
  }

 private:
  // A piece's rows of this rank, among all of its own.
  Rows own_rows(const Rows& piece) const { return {piece.first / size(), piece.count / size()}; }

  // Starts to gather these pieces of rows, each in a collective.
  void gather_pieces(Float* buffer, const Float* own, int columns, const std::vector<Rows>& pieces) {
    ranks_.after(stream_);
    for (size_t k = 0; k < pieces.size(); ++k) {
      const TraceScope scope(int(k), false);
      const Rows rows_here = own_rows(pieces[k]);
      ranks_.all_gather(pieces[k].of(buffer, columns), rows_here.of(own, columns), size_t(rows_here.count) * columns);
    }
  }

  Communicator& ranks_;
  int pieces_;
  cudaStream_t stream_;
  Float *exchange_ = nullptr, *zeros_ = nullptr;
  size_t columns_ = 0;
  uint64_t gathered_ = 0;  // the number of start_gather()'s last collective; 0: the stream has waited for it
};
