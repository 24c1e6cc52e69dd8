// How the pieces of a unit's weights become the whole unit on every rank (zero.cuh decides when): gathered as they are; as
// the codes that are multiplied (fp8_gathering.cuh); or with --compress-weights as codes of eight bits that become weights
// again (extensions/compression/kernels/quantize.cuh), for slow links.
//
// A rank makes codes of its piece in fp32, of the masters where there are some, and all ranks read all codes, their own
// too: so all have the same bits. The exact piece stays where it is, and is what AdamW updates and a checkpoint holds. So
// with ZeRO 1 and 2 there are masters in fp32, too. What rounding leaves out changes no later weight: it needs no error
// feedback. Between hosts only (gpt/gradient_reduction.cuh): ranks with the same place in their hosts gather codes, and
// send what these say to the other ranks of their host.
#pragma once

#include "extensions/compression/kernels/quantize.cuh"
#include "extensions/fp8/fp8_gathering.cuh"
#include "gpt/mesh.cuh"
#include "gpt/parameters.h"
#include "kernels/device/memory.cuh"

template <class Float>
class WeightGathering {
 public:
  static constexpr int bits = 8;

  // zero: the ZeRO stage
  WeightGathering(const Shards& shards, const StoreOptions& options, int zero, Mesh& mesh)
      : shards_(shards), mesh_(mesh), is_compressed_(options.compress_weights && zero > 0),
        fp8_(shards, options.fp8, zero == 3 && !is_compressed_ && !options.fp8.tiles) {}

  bool is_compressed() const { return is_compressed_; }
  Fp8Gathering<Float>& fp8() { return fp8_; }
  // Of the whole unit as it is gathered.
  size_t elements(int unit) const { return shards_.whole(unit) / (fp8_.has(unit) ? sizeof(Float) : 1); }

  void lay_out(Arena& arena) {
    const size_t ranks = size_t(shards_.ranks());
    if (is_compressed_) codes_ = arena.take<uint8_t>(ranks * message_bytes(shards_.largest() / ranks, bits));
  }

  // whole: a unit's weights, from `piece`, which may be this rank's piece of it; exact: the piece in fp32. On the ranks'
  // stream.
  void gather(int unit, Float* whole, const Float* piece, const float* exact) {
    const size_t count = shards_.piece(unit), bytes = message_bytes(count, bits);
    if constexpr (can_multiply_fp8<Float>)
      if (fp8_.has(unit)) return fp8_.gather(unit, reinterpret_cast<uint8_t*>(whole), piece, mesh_.data());
    if (!is_compressed_) return mesh_.data().all_gather(whole, piece, count);
    Communicator &inside = mesh_.inside(), &between = mesh_.between();
    const size_t host = size_t(inside.size()) * count, place = size_t(inside.rank()) * count;
    uint8_t* const own = codes_ + size_t(between.rank()) * bytes;
    quantize(own, exact, nullptr, {1, count}, bits, nullptr, Feedback::add, between.stream());
    between.all_gather(codes_, static_cast<const uint8_t*>(own), bytes);
    dequantize(whole + place, codes_, {between.size(), count, host}, 1, bits, false, between.stream());
    for (Float* part = whole; part != whole + shards_.whole(unit); part += host) inside.all_gather(part, part + place, count);
  }

 private:
  const Shards& shards_;
  Mesh& mesh_;
  bool is_compressed_;
  Fp8Gathering<Float> fp8_;
  uint8_t* codes_ = nullptr;  // of all pieces of a unit
};
