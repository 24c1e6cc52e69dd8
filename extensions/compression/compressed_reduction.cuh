// How a unit's gradients are added up over the data-parallel ranks without being sent as they are:
//
//                                        ZeRO 0                                      ZeRO 1 to 3
//   --compress int8, int4                all_to_all, all_gather                      all_to_all
//   --compress powersgd:R                all_reduce of factors, twice (low_rank.cuh)   the same; not with ZeRO 2 and 3
//
// As codes (kernels/quantize.cuh has the format), a rank sends each other one a message with the codes of that one's
// piece, and adds up what it receives in fp32, in the order of ranks (ZeRO++: Wang et al., arXiv:2306.10209, section
// 3.3). So each gradient is rounded once, and not at each hop of a ring. With ZeRO 0 it then sends codes of the sums of
// its piece to all. All ranks read the same codes, so all have the same bits. Beside tensor-parallel ranks tensors and pieces begin
// at multiples of a run of codes: no scale is of two tensors, so these ranks have the same codes of what they have alike.
//
// What rounding leaves out is not lost: a rank keeps the *errors* of its messages, and adds them to the next gradients of
// the unit (error feedback: Karimireddy et al., arXiv:1901.09847). So all messages since the start add up to all
// gradients, less what the errors are now. This holds for any sequence of messages. So there is one array of errors,
// whether a unit is reduced in each step or in each micro-step, and the errors of the sums of ZeRO 0 are added to it, too:
// they are the next messages' to make up for. An update that is left out leaves out the errors.
//
// With --compress-where hosts the ranks of a host first add up what they have as it is, each for the pieces of the ranks
// with its place in their hosts. Only ranks with the same place, in other hosts, send each other codes of these sums.
//
// Errors are 4 bytes for each parameter that a rank sends codes of: of all, or a part between hosts. Each rank's are its own.
// They are in units of the loss scale, which may change.
#pragma once

#include <vector>

#include "extensions/compression/kernels/quantize.cuh"
#include "extensions/compression/low_rank.cuh"
#include "extensions/compression/options.h"
#include "gpt/store_room.cuh"

static_assert(TensorList::run_of_codes == scale_run);

template <class Float>
class CompressedReduction final : public GradientReduction<Float> {
 public:
  CompressedReduction(const StoreParts<Float>& parts, const CompressionOptions& options)
      : GradientReduction<Float>(parts.shards, parts.zero, parts.mesh.data(), parts.options), mesh_(parts.mesh),
        bits_(options.bits), low_rank_(shards_, options.low_rank, parts.options.seed, mesh_) {}

  void add_to(DeviceMemory& memory) override {
    memory.add("errors", [this](Arena& arena) {
      errors_ = arena.take<float>(error_count());
      low_rank_.lay_out(arena);
    });
  }
  bool has_messages() const override { return true; }
  void lay_out_messages(Arena& arena) override {
    const size_t messages = bits_ ? size_t(ranks_.size()) * message_bytes(shards_.largest() / size_t(ranks_.size()), bits_) : 0;
    if (bits_) sent_ = arena.take<uint8_t>(messages), received_ = arena.take<uint8_t>(messages);
    low_rank_.lay_out_messages(arena);
  }

  bool has_errors() const override { return true; }
  std::span<const TensorDescriptor> factors() const override { return low_rank_.factors(); }
  float* kept(State state, const Slice& slice) const override {
    if (state == State::factor) return low_rank_.factor(slice);
    return state == State::error ? errors(slice.tensor->unit, slice.in_unit) : nullptr;
  }
  void clear(cudaStream_t stream) override {
    CUDA_CHECK(cudaMemsetAsync(errors_, 0, error_count() * sizeof(float), stream));
    low_rank_.draw(stream);
  }

  void reduce(int unit, float* whole, float* sum, bool add, const GradientSummary* summary) override {
    if (low_rank_.is_on()) low_rank_.reduce(unit, whole, errors_or_none(unit, 0), &summary->scale.value);
    else reduce_codes(unit, whole, sum, add, &summary->scale.value);
  }
  void end_step(const GradientSummary* summary, cudaStream_t stream) override {
    clear_if_left_out(errors_, error_count(), &summary->factor, stream);
  }

 private:
  using GradientReduction<Float>::shards_;
  using GradientReduction<Float>::zero_;
  using GradientReduction<Float>::ranks_;

  size_t error_count() const { return shards_.all_whole() / size_t(shards_.inside()); }
  // The error of an element of a unit, in one of the pieces that this rank sends codes of, and of those that follow it there.
  float* errors(int unit, size_t element) const {
    const size_t piece = shards_.piece(unit), inside = size_t(shards_.inside());
    return errors_ + shards_.whole_offset(unit) / inside + element / piece / inside * piece + element % piece;
  }
  // A rehearsal keeps none.
  float* errors_or_none(int unit, size_t element) const { return mesh_.is_rehearsing() ? nullptr : errors(unit, element); }

  void reduce_codes(int unit, float* whole, float* sum, bool add, const float* loss_scale) {
    Communicator &inside = mesh_.inside(), &between = mesh_.between();
    const size_t piece = shards_.piece(unit), begin = shards_.begin(unit), bytes = message_bytes(piece, bits_);
    const size_t host = size_t(inside.size()) * piece, place = size_t(inside.rank()) * piece;  // elements for a host's ranks
    const Pieces one = {1, piece}, all = {between.size(), piece, host};
    const cudaStream_t stream = ranks_.stream();
    if (zero_ == 0) sum = whole + begin;
    for (float* part = whole; part != whole + shards_.whole(unit); part += host) inside.reduce_scatter(part + place, part, piece);
    quantize(sent_, whole + place, errors_or_none(unit, place), all, bits_, loss_scale, Feedback::add, stream);
    between.all_to_all(received_, sent_, bytes);
    dequantize(sum, received_, one, between.size(), bits_, add, stream);
    if (zero_ > 0) return;
    uint8_t* const own = sent_ + size_t(between.rank()) * bytes;
    quantize(own, sum, errors_or_none(unit, begin), one, bits_, loss_scale, Feedback::keep, stream);
    between.all_gather(sent_, own, bytes);
    dequantize(whole + place, sent_, all, 1, bits_, false, stream);
    for (float* part = whole; part != whole + shards_.whole(unit); part += host) inside.all_gather(part, part + place, piece);
  }

  Mesh& mesh_;
  int bits_;  // of a code; 0: gradients travel as factors
  LowRank low_rank_;
  uint8_t *sent_ = nullptr, *received_ = nullptr;  // messages, one for each rank
  float* errors_ = nullptr;  // of all units, of each the pieces that this rank sends codes of
};
