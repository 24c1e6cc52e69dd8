// How units are cut into pieces, one a rank. A unit of `count` elements has N pieces of ⌈count / N⌉ elements, rounded
// up to TensorList::alignment, and is padded to N pieces: any number of ranks fits any model.
//
// Arrays that hold whole units, and arrays that hold one rank's pieces, have the units one after another.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel/tensors.h"

// Neighbouring elements of one tensor that lie in one piece.
struct Slice {
  const TensorDescriptor* tensor;
  size_t first, count;  // elements of the unpadded tensor
  size_t in_unit;       // where `first` lies, from the start of the unit
};

class Shards {
 public:
  Shards(const TensorList& list, int ranks, int rank) : list_(list), ranks_(ranks), rank_(rank) {
    for (const Unit& unit : list.units()) {
      const size_t align = TensorList::alignment, share = (unit.count + ranks - 1) / ranks;
      piece_.push_back((share + align - 1) / align * align);
      piece_offset_.push_back(pieces_);
      pieces_ += piece_.back();
    }
  }

  int units() const { return int(piece_.size()); }
  int rank() const { return rank_; }
  size_t piece(int unit) const { return piece_[unit]; }             // elements of a rank's piece
  size_t whole(int unit) const { return piece_[unit] * ranks_; }    // elements of a padded unit
  size_t piece_offset(int unit) const { return piece_offset_[unit]; }
  size_t whole_offset(int unit) const { return piece_offset_[unit] * ranks_; }
  size_t all_pieces() const { return pieces_; }                     // elements of a rank's pieces of all units
  size_t all_whole() const { return pieces_ * ranks_; }
  size_t begin(int unit) const { return piece_[unit] * rank_; }     // this rank's piece, from the start of the unit

  // The parts of tensors in elements [begin, begin + count) of a unit; padding left out.
  std::vector<Slice> slices(int unit, size_t begin, size_t count) const {
    std::vector<Slice> slices;
    const size_t end = begin + count;
    for (const TensorDescriptor& tensor : list_.tensors()) {
      if (tensor.unit != unit) continue;
      const size_t first = std::max(begin, tensor.offset), last = std::min(end, tensor.offset + tensor.count());
      if (first < last) slices.push_back({&tensor, first - tensor.offset, last - first, first});
    }
    return slices;
  }

  // What this rank writes of a checkpoint: its pieces, in every stage, so that ranks share the work.
  std::vector<Slice> slices_of_rank() const {
    std::vector<Slice> all;
    for (int unit = 0; unit < units(); ++unit)
      for (const Slice& slice : slices(unit, begin(unit), piece(unit))) all.push_back(slice);
    return all;
  }

 private:
  const TensorList& list_;
  int ranks_, rank_;
  std::vector<size_t> piece_, piece_offset_;
  size_t pieces_ = 0;
};
