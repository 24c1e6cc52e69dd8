// Gradients that travel as factors of low rank (PowerSGD: Vogels, Karimireddy, Jaggi, arXiv:1905.13727, algorithms 1 and 2).
// N ranks have the gradients G_i (rows, columns) of a matrix, and are to have their sum:
//
//   M_i = G_i + error_i          gradient plus residual (compressed_reduction.cuh keeps the residuals)
//   P   = Σ_i Q·M_iᵀ             (R, rows)      all_reduce; then its rows are made orthonormal, by each rank
//   Q'  = Σ_i P·M_i              (R, columns)   all_reduce
//   M̂   = Pᵀ·Q'                  takes the place of the sum; error_i = M_i − M̂/N
//
// M̂ is the projection of Σ M_i onto R directions, and each step turns these nearer to the R largest (power iteration),
// because the next one begins with Q' for Q. The first Q is random. All ranks have P and Q' from the same sums, so all have
// the same bits of M̂. And Σ_i error_i = Σ_i M_i − M̂: the applied sums and the residuals of all ranks add up to all
// gradients.
//
// (rows + columns)·R numbers travel instead of rows·columns, twice as in any all_reduce. With ZeRO 1, too: each rank has
// all of M̂, and keeps its piece. Vectors, and matrices that are too small, are added up without compression, together
// with P.
#pragma once

#include <algorithm>
#include <vector>

#include "extensions/compression/kernels/low_rank.cuh"
#include "extensions/compression/low_rank.h"
#include "gpt/mesh.cuh"
#include "gpt/shards.h"
#include "kernels/device/memory.cuh"
#include "kernels/random.cuh"

class LowRank {
 public:
  static_assert(most_low_rank <= most_rank);

  // rank: R; 0: nothing travels as factors
  LowRank(const Shards& shards, int rank, uint64_t seed, Mesh& mesh) : mesh_(mesh), rank_(rank), seed_(seed), units_(size_t(shards.units())) {
    const TensorList& list = shards.list();
    for (const TensorDescriptor& tensor : list.tensors()) {
      const LowRankShape shape = low_rank_shape(tensor, list, rank);
      const bool is_here = list.has(tensor);
      Unit& unit = units_[size_t(tensor.unit)];
      if (is_here && shape.rank == 0) unit.others.push_back(&tensor);
      if (shape.rank == 0) continue;
      factors_.push_back({tensor.name, {size_t(shape.rank), size_t(shape.columns)}, Initial::normal, tensor.unit, count_, {}, {}, is_here ? shape.q() : 0});
      if (!is_here) continue;
      unit.matrices.push_back({&tensor, shape, unit.p, unit.q, count_});
      unit.p += shape.p(), unit.q += shape.q(), count_ += shape.q();
    }
  }

  bool is_on() const { return rank_ > 0; }
  // The Q of each matrix of the model, as a tensor that is not sharded; each tensor-parallel rank has its own. Its offset is its
  // place among all Q of this rank.
  const std::vector<TensorDescriptor>& factors() const { return factors_; }
  // The address of a slice of the factors.
  float* factor(const Slice& slice) const { return factors_q_ + slice.tensor->offset + slice.first; }

  void lay_out_messages(Arena& arena) {
    size_t most_p = 0, most_q = 0;
    for (const Unit& unit : units_) most_p = std::max(most_p, unit.p), most_q = std::max(most_q, unit.q);
    if (is_on()) p_ = arena.take<float>(most_p), q_ = arena.take<float>(most_q);
  }
  void lay_out(Arena& arena) {
    if (is_on()) factors_q_ = arena.take<float>(count_);
  }

  // Draws the first Q. An element of a whole matrix's Q has the same value on every mesh.
  void draw(cudaStream_t stream) {
    for (const Unit& unit : units_)
      for (const Matrix& matrix : unit.matrices) {
        const TensorDescriptor& tensor = *matrix.tensor;
        const Part part = tensor.split.axis == 1 ? tensor.part : Part();
        if (factors_q_) fill_random(factors_q_ + matrix.first, 0, matrix.shape.q(), random_key(seed_, "Q of " + tensor.name), 1, stream, part);
      }
  }

  // Puts the sum over the ranks into the place of `whole`, this rank's gradients of a unit, on the ranks' stream. errors: of
  // the unit, in units of *scale; null in a rehearsal, which keeps nothing.
  void reduce(int number, float* whole, float* errors, const float* scale) {
    Communicator& data = mesh_.data();
    const cudaStream_t stream = data.stream();
    const Unit& unit = units_[size_t(number)];
    std::vector<Summed> sums;
    if (unit.p > 0) sums.emplace_back(p_, unit.p);
    for (const TensorDescriptor* tensor : unit.others) sums.emplace_back(whole + tensor->offset, tensor->local);
    const auto errors_of = [&](const TensorDescriptor* tensor) { return errors ? errors + tensor->offset : nullptr; };
    for (const auto& [tensor, s, p, q, first] : unit.matrices)
      project_rows(p_ + p, whole + tensor->offset, errors_of(tensor), scale, factors_q_ + first, s.rows, s.columns, s.rank, stream);
    data.all_reduce(sums);
    for (const auto& [tensor, s, p, q, first] : unit.matrices) {
      orthonormalize(p_ + p, s.rows, s.rank, stream);
      project_columns(q_ + q, p_ + p, whole + tensor->offset, s.rows, s.columns, s.rank, stream);
    }
    if (unit.q > 0) data.all_reduce(q_, unit.q);
    for (const auto& [tensor, s, p, q, first] : unit.matrices)
      restore(whole + tensor->offset, errors_of(tensor), scale, p_ + p, q_ + q, s.rows, s.columns, s.rank, data.size(), stream);
    if (errors && unit.q > 0) replace_factors(factors_q_ + unit.matrices[0].first, q_, unit.q, stream);  // lie as in q_
  }

 private:
  struct Matrix {
    const TensorDescriptor* tensor;
    LowRankShape shape;
    size_t p, q, first;  // where its P and Q begin among those of its unit, and its Q among all of this rank
  };
  struct Unit {
    std::vector<Matrix> matrices;                 // of this rank
    std::vector<const TensorDescriptor*> others;  // are added up as they are
    size_t p = 0, q = 0;                          // numbers of all P, and of all Q
  };

  Mesh& mesh_;
  int rank_;
  uint64_t seed_;
  std::vector<Unit> units_;
  std::vector<TensorDescriptor> factors_;
  size_t count_ = 0;            // numbers of all Q
  float* factors_q_ = nullptr;  // Q for the start of the next step
  float *p_ = nullptr, *q_ = nullptr;  // of the unit that is reduced
};
