// How units are cut into pieces, one for each rank of the data group (mesh.cuh). The words of this folder:
//
//   unit    the tensors that are gathered and reduced together: the embedding, a block, or the final norm (tensors.h)
//   whole   a unit padded to N equal pieces, for the N ranks of the data group
//   piece   one of these N equal shares; rank r keeps piece r of every unit. A piece may hold parts of several tensors
//   slice   neighbouring elements of one tensor that lie in one piece (or in another range of a unit)
//   kept    the elements that this rank holds of a unit: the whole unit in ZeRO 0, else its piece
//   owned   the elements that this rank, and no other, adds to the norm and answers for in a checkpoint: a part of its piece.
//           (Tensor-parallel ranks may exchange it first, and another one writes it: blocks.h)
//   unit buffer   device memory for one whole unit; units may take turns in it (zero.cuh)
//
// A piece of a unit of `count` elements has ⌈count / N⌉ elements, rounded up to a multiple of TensorList::alignment(). So
// any number of ranks fits any model. Arrays of whole units, and arrays of one rank's pieces, hold all units in order.
// (Token shards are something else: files of training data, gpt/data.h.)
#pragma once

#include <algorithm>
#include <vector>

#include "gpt/tensors.h"

// All are numbers of elements on this rank: where tensor parallelism splits the tensor, TensorDescriptor::part says
// which elements of the whole tensor they are.
struct Slice {
  const TensorDescriptor* tensor;
  size_t first, count;  // elements [first, first + count) of the tensor, padding left out
  size_t in_unit;       // offset of element `first` from the start of the unit
};

// Elements [begin, begin + count) of a unit.
struct Range {
  size_t begin, count;
};

class Shards {
 public:
  // inside: how many neighbouring ranks add up their gradients before they are compressed (compressed_reduction.cuh)
  Shards(const TensorList& list, int ranks, int rank, int inside = 1) : list_(list), ranks_(ranks), rank_(rank), inside_(inside) {
    for (const Unit& unit : list.units()) {
      const size_t align = list.alignment(), share = (unit.count + ranks - 1) / ranks;
      piece_.push_back((share + align - 1) / align * align);
      piece_offset_.push_back(pieces_);
      pieces_ += piece_.back();
    }
  }

  const TensorList& list() const { return list_; }
  int units() const { return int(piece_.size()); }
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  int inside() const { return inside_; }
  // All of these are numbers of elements.
  size_t piece(int unit) const { return piece_[unit]; }             // size of one piece
  size_t whole(int unit) const { return piece_[unit] * ranks_; }    // size of the padded unit
  size_t largest_piece() const { return *std::max_element(piece_.begin(), piece_.end()); }
  size_t largest() const { return largest_piece() * ranks_; }       // size of the largest padded unit
  size_t piece_offset(int unit) const { return piece_offset_[unit]; }
  size_t whole_offset(int unit) const { return piece_offset_[unit] * ranks_; }
  size_t all_pieces() const { return pieces_; }                     // size of one rank's pieces of all units
  size_t all_whole() const { return pieces_ * ranks_; }
  size_t begin(int unit) const { return piece_[unit] * rank_; }     // offset of this rank's piece in the unit

  // The slices of tensors that lie in elements [begin, begin + count) of a unit. Padding is left out.
  std::vector<Slice> slices(int unit, size_t begin, size_t count) const {
    std::vector<Slice> slices;
    const size_t end = begin + count;
    for (const TensorDescriptor& tensor : list_.tensors()) {
      if (tensor.unit != unit) continue;
      const size_t first = std::max(begin, tensor.offset), last = std::min(end, tensor.offset + tensor.local);
      if (first < last) slices.push_back({&tensor, first - tensor.offset, last - first, first});
    }
    return slices;
  }

  // The elements of a unit that this rank owns. Every element of the model has exactly one owner: within a
  // data-parallel group the rank whose piece holds it, with any `--zero`; for a tensor that all tensor-parallel ranks
  // hold whole, the first of them; for the embedding, the pipeline's first stage.
  Range owned(int unit) const {
    if (unit == 0 && !list_.is_first_stage()) return {0, 0};
    const size_t end = list_.tp_rank() == 0 ? list_.units()[size_t(unit)].count : list_.units()[size_t(unit)].split;
    const size_t first = std::min(begin(unit), end);
    return {first, std::min(piece(unit), end - first)};
  }

  // The slices that this rank answers for in a checkpoint.
  std::vector<Slice> owned_slices() const {
    std::vector<Slice> all;
    for (int unit = 0; unit < units(); ++unit) {
      const Range range = owned(unit);
      for (const Slice& slice : slices(unit, range.begin, range.count)) all.push_back(slice);
    }
    return all;
  }

 private:
  const TensorList& list_;
  int ranks_, rank_, inside_;
  std::vector<size_t> piece_, piece_offset_;
  size_t pieces_ = 0;
};

// Neighbouring elements among those that this rank keeps of a unit. begin: the number of the first among the unit's kept ones;
// kept: among those of all units.
struct Window {
  int unit;
  size_t begin, kept, count;
};

// The elements that this rank keeps of the units: whole units, or with ZeRO its pieces. Numbers of elements.
class Kept {
 public:
  Kept(const Shards& shards, bool pieces) : shards_(shards), pieces_(pieces) {}

  size_t begin(int unit) const { return pieces_ ? shards_.begin(unit) : 0; }  // offset of the first one in the unit
  size_t count(int unit) const { return pieces_ ? shards_.piece(unit) : shards_.whole(unit); }
  size_t offset(int unit) const { return pieces_ ? shards_.piece_offset(unit) : shards_.whole_offset(unit); }
  size_t total() const { return pieces_ ? shards_.all_pieces() : shards_.all_whole(); }
  // All units in order, in windows of at most as many elements as this rank keeps of a block: the embedding may have several.
  std::vector<Window> windows() const {
    std::vector<Window> all;
    for (int unit = 0; unit < shards_.units(); ++unit)
      for (size_t begin = 0; begin < count(unit); begin += largest_window())
        all.push_back({unit, begin, offset(unit) + begin, std::min(largest_window(), count(unit) - begin)});
    return all;
  }
  size_t largest_window() const {
    size_t largest = 1;
    for (int unit = 1; unit < shards_.units(); ++unit) largest = std::max(largest, count(unit));
    return largest;
  }
  std::vector<Slice> slices(int unit) const { return shards_.slices(unit, begin(unit), count(unit)); }

 private:
  const Shards& shards_;
  bool pieces_;
};
