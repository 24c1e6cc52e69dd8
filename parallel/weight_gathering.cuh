// How the pieces of a unit's weights become the whole unit on every rank (zero.cuh decides when): gathered as they are, or
// with --compress-weights as codes of eight bits (kernels/quantize.cuh), for slow links.
//
// A rank makes codes of its piece in fp32, of the masters where there are some, and all ranks read all codes, their own
// too: so all have the same bits. The exact piece stays where it is, and is what AdamW updates and a checkpoint holds. So
// with ZeRO 1 and 2 there are masters in fp32, too. What rounding leaves out changes no later weight: it needs no error
// feedback.
#pragma once

#include "kernels/device/memory.cuh"
#include "kernels/quantize.cuh"
#include "parallel/collectives.cuh"
#include "parallel/parameters.h"

template <class Float>
class WeightGathering {
 public:
  static constexpr int bits = 8;

  // zero: the ZeRO stage
  WeightGathering(const Shards& shards, const StoreOptions& options, int zero, Communicator& data)
      : shards_(shards), data_(data), is_compressed_(options.compress_weights && zero > 0) {}

  bool is_compressed() const { return is_compressed_; }

  void lay_out(Arena& arena) {
    const size_t ranks = size_t(data_.size());
    if (is_compressed_) codes_ = arena.take<uint8_t>(ranks * message_bytes(shards_.largest() / ranks, bits));
  }

  // whole: a unit's weights, from `piece`, which may be this rank's piece of it; exact: the piece in fp32. On the ranks'
  // stream.
  void gather(int unit, Float* whole, const Float* piece, const float* exact) {
    const size_t count = shards_.piece(unit), bytes = message_bytes(count, bits);
    if (!is_compressed_) return data_.all_gather(whole, piece, count);
    uint8_t* const own = codes_ + size_t(data_.rank()) * bytes;
    quantize(own, exact, nullptr, 1, count, bits, nullptr, Feedback::add, data_.stream());
    data_.all_gather(codes_, static_cast<const uint8_t*>(own), bytes);
    dequantize(whole, codes_, data_.size(), 1, count, bits, false, data_.stream());
  }

 private:
  const Shards& shards_;
  Communicator& data_;
  bool is_compressed_;
  uint8_t* codes_ = nullptr;  // of all pieces of a unit
};
