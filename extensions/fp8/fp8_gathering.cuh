// How ZeRO 3 gathers a block that multiplies in eight bits, with one scale for a matrix (--fp8; extensions/fp8/kernels/fp8.cuh): its
// matrices travel as codes, one byte a parameter instead of two. They are the codes that each rank would cast from the
// whole matrices.
//
//   once after an update   each rank finds the maxima of the matrices' elements in its piece, and copies its elements of the
//                          vectors (biases, LayerNorms: 13·C of a block's 12·C² + 13·C) beside them. One all_reduce makes
//                          both known to all ranks, which keep them until the next update
//   at each gather         each rank casts its piece to the place of its codes in the unit buffer, and codes are gathered
//
// The all_reduce takes the largest of integers of eight bytes, which is exact. The first eight bytes of a scale are its unit,
// which is still zero, and its maximum in the upper half: their order is that of the maxima, NaN last
// (kernels/device/maximum.cuh). Four neighbours of a vector are in one rank's piece, and zero on all other ranks. The vectors begin
// behind four scales, at a multiple of 64 bytes, which packs need on either device.
#pragma once

#include <algorithm>
#include <map>
#include <utility>

#include "extensions/fp8/kernels/fp8.cuh"
#include "extensions/fp8/options.h"
#include "gpt/collectives.cuh"
#include "gpt/parameters.h"
#include "kernels/device/memory.cuh"

// The storage type whose products can be in eight bits.
template <class Float>
constexpr bool can_multiply_fp8 = std::is_same_v<Float, __nv_bfloat16>;

constexpr int fp8_matrices = 4;  // of a block (tensors.h), which come first in its unit
static_assert(fp8_matrices * sizeof(Fp8Scale) % 64 == 0, "the vectors behind the scales are read in packs of up to 64 bytes");

template <class Float>
class Fp8Gathering {
 public:
  Fp8Gathering(const Shards& shards, const Fp8Options& options, bool is_on) : shards_(shards) {
    for (int unit = 1; unit < list().final_norm_unit(); ++unit)
      if (is_on && list().has(unit) && options.has(unit - 1, list().shape().layers)) blocks_[unit] = {};
  }

  // Is this unit gathered as codes?
  bool has(int unit) const { return blocks_.contains(unit); }

  void lay_out(Arena& arena) {
    for (auto& [unit, block] : blocks_) block.scales = arena.take<Fp8Scale>(shared(unit));
  }
  // The weights have changed.
  void forget() {
    for (auto& [unit, block] : blocks_) block.is_known = false;
  }

  const Fp8Scale* scales(int unit) const { return blocks_.at(unit).scales; }
  // The address of a unit's first element, if the unit lay around its vectors here.
  const Float* around_vectors(int unit) const { return vectors(blocks_.at(unit)) - vectors_of(unit).begin; }

  // codes: of the whole unit; piece: this rank's of its weights. On the ranks' stream.
  void gather(int unit, uint8_t* codes, const Float* piece, Communicator& ranks) {
    Block& block = blocks_.at(unit);
    if (!std::exchange(block.is_known, true)) share(unit, block, piece, ranks);
    for (int number = 0; number < fp8_matrices; ++number) {
      const Range part = part_of(unit, number);
      const Fp8Cast to = {codes + part.begin, Fp8Format::e4m3, block.scales + number};
      cast_fp8(to, piece + (part.begin - shards_.begin(unit)), part.count, ranks.stream());  // without values, too: its unit
    }
    ranks.all_gather(codes, codes + shards_.begin(unit), shards_.piece(unit));
  }

 private:
  struct Block {
    Fp8Scale* scales = nullptr;  // of its matrices; the vectors lie behind them
    bool is_known = false;       // to all ranks
  };

  const TensorList& list() const { return shards_.list(); }
  Float* vectors(const Block& block) const { return reinterpret_cast<Float*>(block.scales + fp8_matrices); }
  Range vectors_of(int unit) const {
    const Unit& all = list().units()[size_t(unit)];
    return {all.decayed, all.count - all.decayed};
  }
  // How many scales take as much memory as those of a unit and its vectors.
  size_t shared(int unit) const { return fp8_matrices + vectors_of(unit).count * sizeof(Float) / sizeof(Fp8Scale); }

  // Those of these elements of the unit that lie in this rank's piece.
  Range own(int unit, const Range& all) const {
    const size_t begin = shards_.begin(unit), end = begin + shards_.piece(unit);
    const size_t first = std::clamp(all.begin, begin, end), last = std::clamp(all.begin + all.count, begin, end);
    return {first, last - first};
  }
  Range part_of(int unit, int number) const {
    const TensorDescriptor& matrix = list().tensors_of(unit)[number];
    return own(unit, {matrix.offset, matrix.local});
  }

  void share(int unit, const Block& block, const Float* piece, Communicator& ranks) {
    const Float* const weights = piece - shards_.begin(unit);
    const Range all = vectors_of(unit), part = own(unit, all);
    CUDA_CHECK(cudaMemsetAsync(block.scales, 0, shared(unit) * sizeof(Fp8Scale), ranks.stream()));
    for (int number = 0; number < fp8_matrices; ++number)
      if (const Range of = part_of(unit, number); of.count > 0)
        fp8_maximum(&block.scales[number].maximum, weights + of.begin, of.count, ranks.stream());
    if (part.count > 0)
      CUDA_CHECK(cudaMemcpyAsync(vectors(block) + (part.begin - all.begin), weights + part.begin, part.count * sizeof(Float),
                                 cudaMemcpyDeviceToDevice, ranks.stream()));
    ranks.all_reduce(reinterpret_cast<uint64_t*>(block.scales), shared(unit) * (sizeof(Fp8Scale) / sizeof(uint64_t)), ncclMax);
  }

  const Shards& shards_;
  std::map<int, Block> blocks_;  // by unit
};
