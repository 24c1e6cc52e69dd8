// How a unit's gradients are added up over the data-parallel ranks (zero.cuh decides when):
//
//                                        ZeRO 0                                      ZeRO 1 to 3
//   as they are                          all_reduce                                  reduce_scatter
//   --reduce-dtype bf16                  the same, of what is cast to bf16
//   --compress int8, int4                all_to_all, all_gather                      all_to_all
//
// Compressed (kernels/quantize.cuh has the format), a rank sends each other one a message with the codes of that one's
// piece, and adds up what it receives in fp32, in the order of ranks (ZeRO++: Wang et al., arXiv:2306.10209, section
// 3.3). So each gradient is rounded once, and not at each hop of a ring. With ZeRO 0 it then sends codes of the sums of
// its piece to all. All ranks read the same codes, so all have the same bits.
//
// What rounding leaves out is not lost: a rank keeps the *errors* of its messages, and adds them to the next gradients of
// the unit (error feedback: Karimireddy et al., arXiv:1901.09847). So all messages since the start add up to all
// gradients, less what the errors are now. This holds for any sequence of messages. So there is one array of errors,
// whether a unit is reduced in each step or in each micro-step, and the errors of the sums of ZeRO 0 are added to it, too:
// they are the next messages' to make up for. An update that is left out leaves out the errors.
//
// Errors are 4 bytes for each parameter of whole units: each rank's are its own. They are in units of the loss scale,
// which may change.
#pragma once

#include "kernels/cast.cuh"
#include "kernels/device/memory.cuh"
#include "kernels/quantize.cuh"
#include "parallel/mesh.cuh"
#include "parallel/parameters.h"

template <class Float>
class GradientReduction {
 public:
  // zero: the ZeRO stage
  GradientReduction(const Shards& shards, const StoreOptions& options, int zero, Mesh& mesh)
      : shards_(shards), mesh_(mesh), data_(mesh.data()), zero_(zero),
        bits_(options.training && data_.size() > 1 ? options.compressed_bits : 0),
        casts_(options.training && options.cast_gradients && !std::is_same_v<Float, float> && data_.size() > 1) {}

  bool has_staging() const { return casts_ || bits_ > 0; }
  bool has_errors() const { return bits_ > 0; }

  void lay_out_staging(Arena& arena) {
    if (casts_) cast_ = arena.take<Float>(shards_.largest());
    const size_t messages = bits_ ? size_t(data_.size()) * message_bytes(shards_.largest() / size_t(data_.size()), bits_) : 0;
    if (bits_) sent_ = arena.take<uint8_t>(messages), received_ = arena.take<uint8_t>(messages);
  }
  void lay_out_errors(Arena& arena) { errors_ = arena.take<float>(shards_.all_whole()); }

  // The errors of a whole unit.
  float* errors(int unit) const { return errors_ + shards_.whole_offset(unit); }
  void clear_errors(cudaStream_t stream) {
    if (errors_) CUDA_CHECK(cudaMemsetAsync(errors_, 0, shards_.all_whole() * sizeof(float), stream));
  }

  // Adds up `whole`, this rank's gradients of a unit, over the ranks, on their stream. With ZeRO 0 the sum takes its
  // place. Otherwise it goes to `sum`, this rank's piece (with ZeRO 1 a part of `whole`), or is added to it.
  void reduce(int unit, float* whole, float* sum, bool add, const GradientSummary* summary) {
    if (bits_) reduce_compressed(unit, whole, sum, add, &summary->scale.value);
    else if (casts_) reduce_cast(unit, whole, sum, add);
    else reduce_plain(unit, whole, sum, add);
  }

  // To be called behind the update, when *summary says whether it has been applied.
  void end_step(const GradientSummary* summary, cudaStream_t stream) {
    if (errors_) clear_if_left_out(errors_, shards_.all_whole(), &summary->factor, stream);
  }

 private:
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
    const int ranks = data_.size();
    const size_t piece = shards_.piece(unit), begin = shards_.begin(unit), bytes = message_bytes(piece, bits_);
    const cudaStream_t stream = data_.stream();
    float* const left = mesh_.is_rehearsing() ? nullptr : errors(unit);
    if (zero_ == 0) sum = whole + begin;
    quantize(sent_, whole, left, ranks, piece, bits_, loss_scale, Feedback::add, stream);
    data_.all_to_all(received_, sent_, bytes);
    dequantize(sum, received_, 1, ranks, piece, bits_, add, stream);
    if (zero_ > 0) return;
    uint8_t* const own = sent_ + size_t(data_.rank()) * bytes;
    quantize(own, sum, left ? left + begin : nullptr, 1, piece, bits_, loss_scale, Feedback::keep, stream);
    data_.all_gather(sent_, own, bytes);
    dequantize(whole, sent_, ranks, 1, piece, bits_, false, stream);
  }

  const Shards& shards_;
  const Mesh& mesh_;
  Communicator& data_;
  int zero_;
  int bits_;  // of a code; 0: gradients are not compressed
  bool casts_;
  Float* cast_ = nullptr;  // a unit, in the storage type
  uint8_t *sent_ = nullptr, *received_ = nullptr;  // messages, one for each rank
  float* errors_ = nullptr;  // of all whole units
};
