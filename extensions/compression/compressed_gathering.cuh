// Weights that are gathered as codes of eight bits, which become weights again (--compress-weights; kernels/quantize.cuh), for
// slow links.
//
// A rank makes codes of its piece in fp32, of the masters where there are some, and all ranks read all codes, their own
// too: so all have the same bits. The exact piece stays where it is, and is what AdamW updates and a checkpoint holds. So
// with ZeRO 1 and 2 there are masters in fp32, too. What rounding leaves out changes no later weight: it needs no error
// feedback. Between hosts only (compressed_reduction.cuh): ranks with the same place in their hosts gather codes, and
// send what these say to the other ranks of their host.
#pragma once

#include "extensions/compression/kernels/quantize.cuh"
#include "gpt/store_room.cuh"

template <class Float>
class CompressedGathering final : public WeightGathering<Float> {
 public:
  CompressedGathering(const Shards& shards, Mesh& mesh) : WeightGathering<Float>(shards, mesh.data()), mesh_(mesh) {}

  bool rounds() const override { return true; }

  void lay_out_messages(Arena& arena) override {
    const size_t ranks = size_t(shards_.ranks());
    codes_ = arena.take<uint8_t>(ranks * message_bytes(shards_.largest() / ranks, bits));
  }

  void gather(int unit, Float* whole, const Float*, const float* exact) override {
    const size_t count = shards_.piece(unit), bytes = message_bytes(count, bits);
    Communicator &inside = mesh_.inside(), &between = mesh_.between();
    const size_t host = size_t(inside.size()) * count, place = size_t(inside.rank()) * count;
    uint8_t* const own = codes_ + size_t(between.rank()) * bytes;
    quantize(own, exact, nullptr, {1, count}, bits, nullptr, Feedback::add, between.stream());
    between.all_gather(codes_, static_cast<const uint8_t*>(own), bytes);
    dequantize(whole + place, codes_, {between.size(), count, host}, 1, bits, false, between.stream());
    for (Float* part = whole; part != whole + shards_.whole(unit); part += host) inside.all_gather(part, part + place, count);
  }

 private:
  using WeightGathering<Float>::shards_;
  static constexpr int bits = 8;

  Mesh& mesh_;
  uint8_t* codes_ = nullptr;  // of all pieces of a unit
};
