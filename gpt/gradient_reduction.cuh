// How a unit's gradients are added up over the data-parallel ranks (zero.cuh decides when):
//
//                                        ZeRO 0                                      ZeRO 1 to 3
//   as they are                          all_reduce                                  reduce_scatter
//   --reduce-dtype bf16                  the same, of what is cast to bf16
//   --compress int8, int4                all_to_all, all_gather                      all_to_all
//   --compress powersgd:R                all_reduce of factors, twice (low_rank.cuh)   the same; not with ZeRO 2 and 3
//
// As codes (extensions/compression/kernels/quantize.cuh has the format), a rank sends each other one a message with the codes of that one's
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

#include "extensions/compression/kernels/quantize.cuh"
#include "extensions/compression/low_rank.cuh"
#include "gpt/mesh.cuh"
#include "gpt/parameters.h"
#include "kernels/cast.cuh"
#include "kernels/device/memory.cuh"

static_assert(TensorList::run_of_codes == scale_run);

template <class Float>
class GradientReduction {
 public:
  // zero: the ZeRO stage
  GradientReduction(const Shards& shards, const StoreOptions& options, int zero, Mesh& mesh)
      : shards_(shards), mesh_(mesh), data_(mesh.data()), zero_(zero),
        bits_(options.training && data_.size() > 1 ? options.compressed_bits : 0),
        low_rank_(shards, options.training && data_.size() > 1 ? options.low_rank : 0, options.seed, mesh),
        casts_(options.training && options.cast_gradients && !std::is_same_v<Float, float> && data_.size() > 1) {}

  bool has_staging() const { return casts_ || has_errors(); }
  bool has_errors() const { return bits_ > 0 || low_rank_.is_on(); }
  const std::vector<TensorDescriptor>& factors() const { return low_rank_.factors(); }

  void lay_out_staging(Arena& arena) {
    if (casts_) cast_ = arena.take<Float>(shards_.largest());
    const size_t messages = bits_ ? size_t(data_.size()) * message_bytes(shards_.largest() / size_t(data_.size()), bits_) : 0;
    if (bits_) sent_ = arena.take<uint8_t>(messages), received_ = arena.take<uint8_t>(messages);
    low_rank_.lay_out_staging(arena);
  }
  void lay_out_errors(Arena& arena) {
    errors_ = arena.take<float>(error_count());
    low_rank_.lay_out(arena);
  }

  // The error of an element of a unit, in one of the pieces that this rank sends codes of, and of those that follow it there.
  float* errors(int unit, size_t element) const {
    const size_t piece = shards_.piece(unit), inside = size_t(shards_.inside());
    return errors_ + shards_.whole_offset(unit) / inside + element / piece / inside * piece + element % piece;
  }
  // Where a slice's errors are, or the elements of a factor; null: of another state.
  float* kept(State state, const Slice& slice) const {
    if (state == State::factor) return low_rank_.factor(slice);
    return state == State::error ? errors(slice.tensor->unit, slice.in_unit) : nullptr;
  }
  void clear_errors(cudaStream_t stream) {
    if (errors_) CUDA_CHECK(cudaMemsetAsync(errors_, 0, error_count() * sizeof(float), stream));
    low_rank_.draw(stream);
  }

  // Adds up `whole`, this rank's gradients of a unit, over the ranks, on their stream. With ZeRO 0 the sum takes its
  // place. Otherwise it goes to `sum`, this rank's piece (with ZeRO 1 a part of `whole`), or is added to it.
  void reduce(int unit, float* whole, float* sum, bool add, const GradientSummary* summary) {
    if (low_rank_.is_on()) low_rank_.reduce(unit, whole, errors_or_none(unit, 0), &summary->scale.value);
    else if (bits_) reduce_compressed(unit, whole, sum, add, &summary->scale.value);
    else if (casts_) reduce_cast(unit, whole, sum, add);
    else reduce_plain(unit, whole, sum, add);
  }

  // To be called behind the update, when *summary says whether it has been applied.
  void end_step(const GradientSummary* summary, cudaStream_t stream) {
    if (errors_) clear_if_left_out(errors_, error_count(), &summary->factor, stream);
  }

 private:
  size_t error_count() const { return shards_.all_whole() / size_t(shards_.inside()); }
  // A rehearsal keeps none.
  float* errors_or_none(int unit, size_t element) const { return mesh_.is_rehearsing() ? nullptr : errors(unit, element); }

  void reduce_plain(int unit, float* whole, float* sum, bool add) {
    const size_t piece = shards_.piece(unit);
    if (zero_ == 0) return data_.all_reduce(whole, shards_.whole(unit));
    float* const own = add ? whole + shards_.begin(unit) : sum;
    data_.reduce_scatter(own, whole, piece);
    if (add) accumulate(sum, own, piece, true, data_.stream());
  }

  void reduce_cast(int unit, float* whole, float* sum, bool add) {
    const size_t count = shards_.whole(unit), piece = shards_.piece(unit), begin = shards_.begin(unit);
    cast(cast_, whole, count, data_.stream());
    if (zero_ == 0) data_.all_reduce(cast_, count);
    else data_.reduce_scatter(cast_ + begin, cast_, piece);
    accumulate(sum, cast_ + (zero_ ? begin : 0), zero_ ? piece : count, add, data_.stream());
  }

  void reduce_compressed(int unit, float* whole, float* sum, bool add, const float* loss_scale) {
    Communicator &inside = mesh_.inside(), &between = mesh_.between();
    const size_t piece = shards_.piece(unit), begin = shards_.begin(unit), bytes = message_bytes(piece, bits_);
    const size_t host = size_t(inside.size()) * piece, place = size_t(inside.rank()) * piece;  // elements for a host's ranks
    const Pieces one = {1, piece}, all = {between.size(), piece, host};
    const cudaStream_t stream = data_.stream();
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

  const Shards& shards_;
  Mesh& mesh_;
  Communicator& data_;
  int zero_;
  int bits_;  // of a code; 0: gradients are not sent as codes
  LowRank low_rank_;
  bool casts_;
  Float* cast_ = nullptr;  // a unit, in the storage type
  uint8_t *sent_ = nullptr, *received_ = nullptr;  // messages, one for each rank
  float* errors_ = nullptr;  // of all units, of each the pieces that this rank sends codes of
};
