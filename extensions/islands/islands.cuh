// Islands: groups of ranks with slow links between them, which send each other weights instead of gradients, once in H
// steps (DiLoCo: Douillard et al., arXiv:2311.08105). Each island is a mesh of its own and makes H steps of AdamW with its
// own samples. Then an *outer step* averages their weights (extensions/islands/kernels/outer_step.cuh), and all islands go
// on from the same weights. AdamW's moments stay each island's own.
//
// The fp32 masters are averaged; without masters, the weights (fp32). A rank has the same place in its island as its
// partners in the others, and keeps these arrays for its piece of each unit (shards.h), with any --zero:
//
//   start      w₀, the weights after the last outer step
//   momentum   of the outer steps
//
// A piece is cut into G equal shares, padded. Each island sends share i to island i (all_to_all), which adds up the
// received shares, in the order of islands, and sends the mean to all (all_gather). So every rank that has a weight
// gets the same bits, in other groups of partners, too; and 2·(G−1)/G·4 bytes of each parameter of a piece cross the
// slow link.
//
// With --outer-dtype int8 or int4 (extensions/compression/kernels/quantize.cuh) the *changes* wᵢ − w₀ travel as codes, and so do their sums back
// (Douillard et al., arXiv:2501.18512). The rounding errors of the codes are lost, because all islands go on from
// one w.
//
// With --outer-delay N an island does not wait for the exchange (the same paper). Its weights are *taken* for the outer step,
// which then runs on the islands' stream, while the island makes N more updates. Their changes are added afterwards:
//   w = w₀ + (w' − taken)      w₀: of this outer step, the same bits in all islands; w': after these updates
// Its events are tested by test_islands.
#pragma once

#include <algorithm>
#include <utility>

#include "extensions/compression/kernels/quantize.cuh"
#include "extensions/islands/kernels/outer_step.cuh"
#include "gpt/between_updates.cuh"
#include "gpt/mesh.cuh"
#include "gpt/step_options.h"

class OuterOptimizer final : public BetweenUpdates {
 public:
  OuterOptimizer(const OuterOptions& options, const Shards& shards, Mesh& mesh, cudaStream_t stream)
      : options_(options), shards_(shards), islands_(mesh.islands()), stream_(stream),
        outer_stream_(islands_.size() > 1 ? islands_.stream() : stream) {}

  void add_to(DeviceMemory& memory) override {
    memory.add("islands", [this](Arena& arena) {
      start_ = arena.take<float>(shards_.all_pieces());
      momentum_ = arena.take<float>(shards_.all_pieces());
      if (options_.delay) taken_ = arena.take<float>(shards_.all_pieces());
      if (islands_.size() == 1) return;
      const size_t largest = shards_.largest_piece();
      sent_ = arena.take<float>(padded(largest));
      if (is_coded()) codes_ = arena.take<uint8_t>(islands() * message_bytes(share(largest), options_.bits()));
      if (is_coded()) received_codes_ = arena.take<uint8_t>(islands() * message_bytes(share(largest), options_.bits()));
      else received_ = arena.take<float>(padded(largest));
    });
  }

  void clear() override {
    forget();
    CUDA_CHECK(cudaMemsetAsync(momentum_, 0, shards_.all_pieces() * sizeof(float), stream_));
    if (sent_) CUDA_CHECK(cudaMemsetAsync(sent_, 0, padded(shards_.largest_piece()) * sizeof(float), stream_));
  }

  float* kept(State state, const Slice& slice) const override {
    const int unit = slice.tensor->unit;
    return state == State::outer_momentum ? momentum(unit) + (slice.in_unit - shards_.begin(unit)) : nullptr;
  }

  // Copies the masters as w₀, from which all islands start, if others have been set.
  void before_update(const Masters& masters) override {
    if (!std::exchange(has_start_, true)) copy(start_, masters);
  }
  void forget() override { has_start_ = false; }

  // Starts an outer step of all units, which change_unit() ends. Meanwhile updates may change the masters.
  void begin(const Masters& masters) override {
    copy(taken_, masters);
    islands_.after(stream_);
    for (int unit = 0; unit < shards_.units(); ++unit)
      if (shards_.piece(unit) > 0) bring_together(unit, start(unit), taken_ + shards_.piece_offset(unit));
  }
  // The outer step of a unit, or the end of it, if it is under way. piece: this rank's masters of the unit.
  void change_unit(int unit, float* piece, bool is_under_way) override {
    if (is_under_way) return finish(unit, piece);
    islands_.after(stream_);
    bring_together(unit, piece, piece);
    islands_.wait_for_all(stream_);
  }

 private:
  // The elements of a piece (`count` elements) that one island adds up; and the size of the piece, padded to equal
  // shares.
  size_t share(size_t count) const { return round_up(ceil_div(count, islands()), shards_.list().alignment()); }
  size_t padded(size_t count) const { return share(count) * islands(); }
  size_t islands() const { return size_t(islands_.size()); }
  bool is_coded() const { return options_.bits() > 0; }
  float* start(int unit) const { return start_ + shards_.piece_offset(unit); }
  float* momentum(int unit) const { return momentum_ + shards_.piece_offset(unit); }

  // Adds the changes by this island's updates meanwhile.
  void finish(int unit, float* piece) {
    const size_t count = shards_.piece(unit);
    islands_.wait_for_all(stream_);
    change(piece, piece, taken_ + shards_.piece_offset(unit), count, stream_);
    apply_change(piece, start(unit), piece, 1, count, stream_);
  }

  // The outer step of a unit. weights: the result; own: this island's weights
  void bring_together(int unit, float* weights, const float* own) {
    const float* const mean = islands_.size() == 1 ? own : is_coded() ? mean_by_codes(unit, own) : mean_of(unit, own);
    outer_step(weights, start(unit), momentum(unit), mean, shards_.piece(unit), float(options_.lr), float(options_.momentum),
               outer_stream_);
  }

  const float* mean_of(int unit, const float* piece) {
    const size_t count = share(shards_.piece(unit));
    float* const own = sent_ + size_t(islands_.rank()) * count;
    copy(sent_, piece, shards_.piece(unit), outer_stream_);
    islands_.all_to_all(received_, sent_, count);
    mean_over_islands(own, received_, islands_.size(), count, outer_stream_);
    islands_.all_gather(sent_, own, count);
    return sent_;
  }

  // The same from changes that travel as codes; their residuals are not kept.
  const float* mean_by_codes(int unit, const float* piece) {
    const size_t own = shards_.piece(unit), count = share(own), bytes = message_bytes(count, options_.bits());
    const int all = islands_.size(), bits = options_.bits();
    uint8_t* const of_own = codes_ + size_t(islands_.rank()) * bytes;
    change(sent_, piece, start(unit), own, outer_stream_);
    CUDA_CHECK(cudaMemsetAsync(sent_ + own, 0, (padded(own) - own) * sizeof(float), outer_stream_));
    quantize(codes_, sent_, nullptr, {all, count}, bits, nullptr, Feedback::keep, outer_stream_);
    islands_.all_to_all(received_codes_, codes_, bytes);
    dequantize(sent_, received_codes_, {1, count}, all, bits, false, outer_stream_);
    quantize(of_own, sent_, nullptr, {1, count}, bits, nullptr, Feedback::keep, outer_stream_);
    islands_.all_gather(codes_, of_own, bytes);
    dequantize(sent_, codes_, {all, count}, 1, bits, false, outer_stream_);
    apply_change(sent_, start(unit), sent_, all, own, outer_stream_);
    return sent_;
  }

  static void copy(float* to, const float* from, size_t count, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, count * sizeof(float), cudaMemcpyDeviceToDevice, stream));
  }
  void copy(float* pieces, const Masters& masters) {
    for (int unit = 0; unit < shards_.units(); ++unit)
      copy(pieces + shards_.piece_offset(unit), masters(unit), shards_.piece(unit), stream_);
  }

  OuterOptions options_;
  const Shards& shards_;
  Communicator& islands_;
  cudaStream_t stream_, outer_stream_;  // outer_stream_: on which outer steps run, the islands' if there are several
  bool has_start_ = false;
  float *start_ = nullptr, *momentum_ = nullptr;
  float* taken_ = nullptr;                       // with a delay: the weights that were taken for the outer step under way
  float *sent_ = nullptr, *received_ = nullptr;  // the largest piece, padded: a share for each island
  uint8_t *codes_ = nullptr, *received_codes_ = nullptr;
};
