// Blocks: neighbouring elements of a whole tensor that one rank writes to a checkpoint, or reads from one.
//
// Most elements that a rank owns lie in long runs of neighbouring ones: all of a tensor, rows of a matrix, a slice of
// either. The rank writes such a run as it is, in one block. But of a matrix that tensor parallelism splits by columns
// (c_attn.weight, c_fc.weight) a rank has short runs in every row, and writing short runs takes five times as long
// (dev/results/2026-11-21-faults.md#writes). So the tensor-parallel ranks gather them. A *stripe* is one run of
// each rank, side by side: Part::stride elements. With two ranks, nine stripes, and blocks of at most two stripes:
//
//   stripes   runs of rank 0   runs of rank 1
//   0, 1      ##############   ##############   round 1: the block that rank 0 writes
//   2, 3      ##############   ##############            the block that rank 1 writes
//   4, 5      ##############   ##############   round 2: the block that rank 0 writes
//   6, 7      ##############   ##############            the block that rank 1 writes
//   8         ..............   ..............   left over: each rank writes its own run
//
// In a round each rank sends the others its runs of all stripes of the round, and writes one block. Tensor-parallel
// ranks have the same piece of each unit, so all have the same rounds in the same order. A piece begins and ends
// anywhere: its part of a stripe that is cut there is left over, too.
//
// Reading needs no other rank: a rank reads all stripes that it has runs of, and picks its runs. So it reads more than
// it keeps, but no rank waits for another.
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "gpt/shards.h"
#include "kernels/update.h"

struct CheckpointBlock {
  const TensorDescriptor* tensor;
  size_t first, count;    // elements [first, first + count) of the whole tensor
  bool gathered = false;  // it has runs of all tensor-parallel ranks, which call for their blocks of the round together
  int copy = none;        // of errors and factors: the number of the copy (below)
  State state = State::error;  // of a copy
  static constexpr int none = -1;
};

// The most elements of a block that is gathered, or read and has elements of other ranks: 16 MiB of floats.
constexpr size_t most_at_once = (size_t(16) << 20) / sizeof(float);

// Elements [first, end) of this rank's part of a tensor, run by run.
inline std::vector<CheckpointBlock> runs(const TensorDescriptor& tensor, size_t first, size_t end) {
  const Part& part = tensor.part;
  std::vector<CheckpointBlock> runs;
  for (size_t next; first < end; first = next) {
    next = std::min(end, (first / part.width + 1) * part.width);
    runs.push_back({&tensor, part.in_whole(first), next - first});
  }
  return runs;
}

// Slices as blocks that this rank writes. A gathered block has at most `most` elements; if not even a stripe is so short,
// nothing is gathered.
inline std::vector<CheckpointBlock> blocks_of(const std::vector<Slice>& slices, const TensorList& list, size_t most) {
  const size_t ranks = size_t(list.tp()), rank = size_t(list.tp_rank());
  most = std::min(most, most_at_once / ranks);
  std::vector<CheckpointBlock> blocks;
  for (const Slice& slice : slices) {
    const TensorDescriptor& tensor = *slice.tensor;
    const Part& part = tensor.part;
    size_t next = slice.first;  // the first element that is in no block yet
    const auto add_runs_before = [&](size_t end) {
      std::ranges::copy(runs(tensor, next, end), std::back_inserter(blocks));
      next = std::max(next, end);
    };
    const size_t end = slice.first + slice.count;
    if (ranks > 1 && tensor.split.axis == 1) {
      const size_t first_stripe = (next + part.width - 1) / part.width;  // the first one that is not cut
      add_runs_before(std::min(end, first_stripe * part.width));
      // The ranks have equal shares of a round. The last rounds may have fewer stripes than the others.
      while (next < end) {
        const size_t share = std::min(most / part.stride, (end - next) / part.width / ranks);
        if (share == 0) break;
        blocks.push_back({&tensor, (next / part.width + rank * share) * part.stride, share * part.stride, true});
        next += ranks * share * part.width;
      }
    }
    add_runs_before(end);
  }
  return blocks;
}

// ---- errors

// The slices of a unit that this rank has errors of (runtime/checkpoints/errors.h): its part of each tensor. With several ranks
// inside a host (Shards::inside) only the elements in the pieces of the ranks with its place in their hosts.
inline std::vector<Slice> error_slices(const Shards& shards, int unit) {
  if (shards.inside() == 1) return shards.slices(unit, 0, shards.whole(unit));
  std::vector<Slice> all;
  for (int rank = shards.rank() % shards.inside(); rank < shards.ranks(); rank += shards.inside())
    for (const Slice& slice : shards.slices(unit, size_t(rank) * shards.piece(unit), shards.piece(unit))) all.push_back(slice);
  return all;
}
inline std::vector<Slice> error_slices(const Shards& shards) {
  std::vector<Slice> all;
  for (int unit = 0; unit < shards.units(); ++unit)
    for (const Slice& slice : error_slices(shards, unit)) all.push_back(slice);
  return all;
}

// The slices whose `state` this rank has, of a factor or of all tensors in the tensor's unit. Errors: error_slices(); a factor:
// the whole tensor; momentum of outer steps: the slices of its piece, with any --zero; all others: the slices that it keeps.
inline std::vector<Slice> state_slices(State state, const TensorDescriptor& tensor, const Shards& shards, const Kept& kept) {
  const int unit = tensor.unit;
  if (state == State::error) return error_slices(shards, unit);
  if (state == State::factor) return {{&tensor, 0, tensor.local, 0}};
  if (state == State::outer_momentum) return shards.slices(unit, shards.begin(unit), shards.piece(unit));
  return kept.slices(unit);
}

// The blocks of weights and moments that this rank writes to a checkpoint. All ranks' blocks together hold each element of the model
// once.
inline std::vector<CheckpointBlock> written_blocks(const Shards& shards, size_t most) {
  return blocks_of(shards.owned_slices(), shards.list(), most);
}

// The elements that tensor-parallel ranks exchange in the largest round.
inline size_t most_gathered(const Shards& shards, bool has_errors = false) {
  std::vector<Slice> slices = shards.owned_slices();
  if (has_errors) std::ranges::copy(error_slices(shards), std::back_inserter(slices));
  size_t most = 0;
  for (const CheckpointBlock& block : blocks_of(slices, shards.list(), most_at_once))
    if (block.gathered) most = std::max(most, block.count * size_t(shards.list().tp()));
  return most;
}

// The blocks that this rank reads: they hold all of `kept`, slices of this rank's parts. Those with elements of other
// ranks have at most `most` elements.
inline std::vector<CheckpointBlock> read_blocks(const std::vector<Slice>& kept, size_t most = most_at_once) {
  std::vector<CheckpointBlock> blocks;
  for (const Slice& slice : kept) {
    const Part& part = slice.tensor->part;
    size_t first = part.in_whole(slice.first);
    const size_t end = part.in_whole(slice.first + slice.count - 1) + 1;
    const size_t at_once = end - first == slice.count ? slice.count : most;
    for (; first < end; first += at_once) blocks.push_back({slice.tensor, first, std::min(at_once, end - first)});
  }
  return blocks;
}

// How many of this rank's elements lie before element `whole` of the whole tensor.
inline size_t local_before(const TensorDescriptor& tensor, size_t whole) {
  const Part& part = tensor.part;
  if (whole <= part.first) return 0;
  const size_t distance = whole - part.first;
  if (part.stride == 0) return std::min(distance, tensor.local);  // it has a single run
  return std::min(distance / part.stride * part.width + std::min(distance % part.stride, part.width), tensor.local);
}

// The elements of the slice that lie in the block, both of one tensor.
inline Slice common(const CheckpointBlock& block, const Slice& slice) {
  const size_t first = std::max(slice.first, local_before(*block.tensor, block.first));
  const size_t end = std::min(slice.first + slice.count, local_before(*block.tensor, block.first + block.count));
  return {slice.tensor, first, std::max(first, end) - first, slice.in_unit + first - slice.first};
}

// The values of a slice, picked from the values of a block that holds it.
inline std::vector<float> pick(const Slice& slice, const CheckpointBlock& block, const std::vector<float>& values) {
  if (slice.count == values.size()) return values;
  std::vector<float> picked;
  picked.reserve(slice.count);
  for (const CheckpointBlock& run : runs(*slice.tensor, slice.first, slice.first + slice.count)) {
    const auto first = values.begin() + long(run.first - block.first);
    picked.insert(picked.end(), first, first + long(run.count));
  }
  return picked;
}
