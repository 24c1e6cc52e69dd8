// The products of blocks in eight bits (--fp8; extensions/fp8/kernels/fp8.cuh has formats and scales). Layers ask for them
// (gpt/layers.cuh); a block that is made of layers does not know of it.
//
//   Fp8Weights   the matrices of the blocks that compute in eight bits, as codes in both orientations: two bytes a
//                parameter. Each is cast once a step, from the weights that are multiplied otherwise. But with ZeRO 3
//                there is room for one block: its codes are gathered (fp8_gathering.cuh), and transposed where a pass
//                asks for that; or bf16 is gathered, and cast when the pass comes to the block
//   Fp8Products  casts activations and gradients, each with a scale of its own, and multiplies. Who writes such a tensor
//                asks for the place of its maximum; it is known until a pass of the same slot begins, so backward does
//                not look for the maxima of forward again
//
// With --fp8-scale tiles (extensions/fp8/kernels/fp8_tiles.cuh) each cast finds the maxima of its tiles by itself, and nobody asks for one.
//
// What a scale is of: of the rows that a product multiplies on this rank. Data-parallel and context-parallel ranks
// each have their own, as they have other rows; so has each piece of rows that tensor parallelism sends (--tp-pieces),
// and each rank's part of a split weight. So no scale travels (but of weights that ZeRO 3 gathers as codes), and ranks that
// must hold the same weights cast the same codes from them.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "extensions/fp8/fp8_gathering.cuh"
#include "extensions/fp8/kernels/fp8.cuh"
#include "extensions/fp8/kernels/fp8_tiles.cuh"
#include "kernels/device/memory.cuh"
#include "kernels/matmul.cuh"

template <class Float>
class Fp8Weights {
 public:
  // is_ring: units take turns in one place.
  Fp8Weights(const TensorList& list, const Fp8Options& options, bool is_ring, Fp8Gathering<Float>& gathering)
      : list_(list), has_tiles_(options.tiles), gathering_(gathering), place_(size_t(list.final_norm_unit() + 1), none) {
    for (int unit = 1; unit < list.final_norm_unit(); ++unit)
      if (list.has(unit) && options.has(unit - 1, list.shape().layers)) {
        if (!is_ring || holds_.empty()) holds_.push_back(none);
        place_[size_t(unit)] = int(holds_.size()) - 1;
        block_ = list.units()[size_t(unit)].decayed;
        units_ = 0;
        gathers_ = gathering.has(unit);
        for (int number = 0; number < matrices; ++number) {
          const auto [rows, columns] = shape_of(list.tensors_of(unit)[number]);
          unit_places_[size_t(number)] = units_;
          units_ += std::max(fp8_block_units(rows, columns), fp8_block_units(columns, rows));
        }
      }
  }

  bool has(int unit) const { return place_[size_t(unit)] != none; }
  bool is_used() const { return !holds_.empty(); }

  void lay_out(Arena& arena) {
    for (int transposed : {0, 1})
      if (transposed || !gathers_) codes_[transposed] = arena.take<uint8_t>(holds_.size() * block_);
    if (gathers_) gathering_.lay_out(arena);
    else if (!has_tiles_) scales_ = arena.take<Fp8Scale>(holds_.size() * matrices);
    else for (float*& units : block_units_) units = arena.take<float>(holds_.size() * units_);
  }

  // The weights have changed: all are to be cast again.
  void forget() {
    std::ranges::fill(holds_, int(none));
    transposed_.fill(none);
    gathering_.forget();
  }
  // Are the codes of all units there?
  bool is_up_to_date() const { return std::ranges::count(holds_, int(none)) == 0; }

  // Casts a unit's matrices, unless that has been done since they changed. weights: of the whole unit, as they have been
  // gathered. Returns the address by which its other tensors are found.
  const Float* use(int unit, Float* weights, cudaStream_t stream) {
    if (gathering_.has(unit)) {
      codes_[0] = reinterpret_cast<uint8_t*>(weights), stream_ = stream;
      return gathering_.around_vectors(unit);
    }
    if (!has(unit) || std::exchange(holds_[size_t(place_[size_t(unit)])], unit) == unit) return weights;
    if constexpr (can_multiply_fp8<Float>) {
      Fp8Scale* const scales = has_tiles_ ? nullptr : scales_of(unit);
      if (scales) CUDA_CHECK(cudaMemsetAsync(scales, 0, matrices * sizeof(Fp8Scale), stream));
      for (int number = 0; number < matrices; ++number) {
        const TensorDescriptor& tensor = list_.tensors_of(unit)[number];
        const auto [rows, columns] = shape_of(tensor);
        const Float* const matrix = weights + tensor.offset;
        if (!scales) {
          cast_tiles_fp8({at(0, tensor), units_of(0, unit, number)}, {at(1, tensor), units_of(1, unit, number)}, Fp8Format::e4m3,
                         Fp8Units::blocks, matrix, rows, columns, stream);
          continue;
        }
        fp8_maximum(&scales[number].maximum, matrix, tensor.local, stream);
        cast_transpose_fp8({at(0, tensor), Fp8Format::e4m3, scales + number}, at(1, tensor), matrix, rows, columns, stream);
      }
    }
    return weights;
  }

  // A matrix of a unit as it is stored (inputs, outputs), or transposed.
  Fp8Matrix matrix(int unit, int number, bool transposed) {
    const TensorDescriptor& tensor = list_.tensors_of(unit)[number];
    const uint8_t* const codes = at(transposed, tensor);
    if (has_tiles_) return {codes, Fp8Format::e4m3, units_of(transposed, unit, number), Fp8Units::blocks};
    if (!gathers_) return {codes, Fp8Format::e4m3, &scales_of(unit)[number].unit};
    if (transposed && std::exchange(transposed_[size_t(number)], unit) != unit) {
      const auto [rows, columns] = shape_of(tensor);
      transpose_fp8(at(1, tensor), at(0, tensor), Fp8Format::e4m3, rows, columns, stream_);
    }
    return {codes, Fp8Format::e4m3, &gathering_.scales(unit)[number].unit};
  }
  // The codes of a unit's matrices as they are stored, each at its offset in the unit.
  const uint8_t* codes(int unit) const { return codes_[0] + size_t(place_[size_t(unit)]) * block_; }

 private:
  static constexpr int none = -1, matrices = fp8_matrices;

  // Of this rank's part of a matrix.
  std::pair<int, int> shape_of(const TensorDescriptor& tensor) const {
    const int rows = int(tensor.shape[0]) / (tensor.split.axis == 0 ? list_.tp() : 1);
    return {rows, int(tensor.local) / rows};
  }

  float* units_of(bool transposed, int unit, int number) const {
    return block_units_[transposed] + size_t(place_[size_t(unit)]) * units_ + unit_places_[size_t(number)];
  }
  Fp8Scale* scales_of(int unit) const { return scales_ + size_t(place_[size_t(unit)]) * matrices; }

  uint8_t* at(bool transposed, const TensorDescriptor& tensor) const {
    return codes_[transposed] + size_t(place_[size_t(tensor.unit)]) * block_ + tensor.offset;
  }

  const TensorList& list_;
  bool has_tiles_, gathers_ = false;
  Fp8Gathering<Float>& gathering_;
  cudaStream_t stream_ = nullptr;
  std::vector<int> place_;     // by unit: its place in the arrays; none: it computes in bf16
  std::vector<int> holds_;     // by place: the unit whose codes are there
  size_t block_ = 0;           // elements of a block's matrices
  uint8_t* codes_[2] = {};     // as stored (gathered codes: in the buffer of the unit in use), and transposed
  std::array<int, matrices> transposed_ = {};  // of gathered codes: the unit whose matrix lies there transposed
  Fp8Scale* scales_ = nullptr;
  size_t units_ = 0;                               // of a block's matrices, with tiles
  std::array<size_t, matrices> unit_places_ = {};  // where those of a matrix begin
  float* block_units_[2] = {};
};

template <class Float>
class Fp8Products {
 public:
  Fp8Products(const Fp8Options& options, cudaStream_t stream)
      : gradients_(options.gradients), has_tiles_(options.tiles), stream_(stream) {}

  // rows, columns: of the largest matrix that is cast. most: tensors of a pass that have maxima, in pieces of rows
  void lay_out(Arena& arena, int rows, int columns, int slots, size_t most) {
    for (Place* place : {&straight_, &transposed_}) {
      place->codes = arena.take<uint8_t>(size_t(rows) * columns);
      if (has_tiles_)
        place->units = arena.take<float>(std::max(fp8_tile_units(rows, columns), fp8_tile_units(columns, rows)));
    }
    if (!has_tiles_) scales_ = arena.take<Fp8Scale>(size_t(slots + 1) * most);
    slots_ = slots, most_ = most;
  }

  // A pass begins: forward of a slot, whose maxima are known until its next one; or, without a slot, another pass, whose
  // maxima are known until any such pass begins. (Launches may be recorded, so the tensors of a pass have the same scales
  // each time.)
  void begin(std::optional<int> slot = {}) {
    if (!scales_) return;
    next_ = scales_ + size_t(slot.value_or(slots_)) * most_, end_ = next_ + most_;
    std::erase_if(known_, [&](const auto& known) { return next_ <= known.second.scale && known.second.scale < end_; });
    CUDA_CHECK(cudaMemsetAsync(next_, 0, most_ * sizeof(Fp8Scale), stream_));
  }

  // Where the launch that now writes all of `tensor` (count) leaves its maximum; null: no product is in eight bits
  float* maximum_of(const Float* tensor, size_t count) {
    if (!scales_) return nullptr;
    Fp8Scale* const scale = take();
    known_[tensor] = {scale, count};
    return &scale->maximum;
  }

  // The same in a launch of its own, for a tensor that more than one product takes.
  void find_maximum(const Float* tensor, size_t count) {
    if (float* const maximum = maximum_of(tensor, count)) fp8_maximum(maximum, tensor, count, stream_);
  }

  // Numbers have been written by a launch that takes no maximum: what was known of this memory is no longer true.
  void forget(const Float* values, size_t count) {
    known_.erase(known_.lower_bound(values), known_.lower_bound(values + count));
  }

  // Does the weight gradient of a product come right after its input gradient?
  bool weight_gradients_follow = true;

  // out (rows,outputs) = x (rows,inputs) · weight + bias; weight: transposed (outputs,inputs)
  void forward(Float* out, const Float* x, const Fp8Matrix& weight, const Float* bias, int rows, int inputs, int outputs) {
    cast(&straight_, nullptr, x, Fp8Format::e4m3, rows, inputs);
    matmul_fp8("matmul_forward", out, matrix(straight_), weight, bias,
               {.m = rows, .n = outputs, .k = inputs, .transpose_b = true, .fast_sums = !has_tiles_}, stream_);
  }

  // dx (rows,inputs) = dout (rows,outputs) · weightᵀ; weight: as stored (inputs,outputs). for_weights:
  // weight_gradient() comes next, with the same dout
  void input_gradient(Float* dx, const Float* dout, const Fp8Matrix& weight, int rows, int inputs, int outputs,
                      bool for_weights) {
    cast(&straight_, for_weights ? &transposed_ : nullptr, dout, gradients_, rows, outputs);
    has_transposed_ = for_weights;
    matmul_fp8<Float>("matmul_input_gradient", dx, matrix(straight_), weight, nullptr,
                      {.m = rows, .n = inputs, .k = outputs, .transpose_b = true}, stream_);
  }

  // dweight (inputs,outputs) = xᵀ·dout, or += if `accumulate`. follows: input_gradient() came just before
  void weight_gradient(float* dweight, const Float* dout, const Float* x, int rows, int inputs, int outputs,
                       bool accumulate, bool follows) {
    if (!follows || !has_transposed_) cast(nullptr, &transposed_, dout, gradients_, rows, outputs);
    cast(nullptr, &straight_, x, Fp8Format::e4m3, rows, inputs);
    matmul_fp8("matmul_weight_gradient", dweight, matrix(straight_), matrix(transposed_), nullptr,
               {.m = inputs, .n = outputs, .k = rows, .transpose_b = true, .accumulate = accumulate}, stream_);
    has_transposed_ = false;
  }

 private:
  struct Known {
    Fp8Scale* scale;
    size_t count;  // elements that the maximum is of
  };

  // One matrix in eight bits.
  struct Place {
    uint8_t* codes = nullptr;
    float* units = nullptr;  // of its tiles
    Fp8Format format = Fp8Format::e4m3;
    const Fp8Scale* scale = nullptr;  // without tiles
  };

  Fp8Matrix matrix(const Place& place) const {
    if (has_tiles_) return {place.codes, place.format, place.units, Fp8Units::tiles};
    return {place.codes, place.format, &place.scale->unit};
  }

  // Casts x (rows,columns) to `straight`, and its transpose to `transposed`; null: not wanted.
  void cast(Place* straight, Place* transposed, const Float* x, Fp8Format format, int rows, int columns) {
    Fp8Scale* const scale = has_tiles_ ? nullptr : scale_of(x, rows, columns);
    for (Place* place : {straight, transposed})
      if (place) place->format = format, place->scale = scale;
    const auto tiles = [](const Place* place) { return place ? Fp8TileCast{place->codes, place->units} : Fp8TileCast{}; };
    const Fp8Cast whole = {straight ? straight->codes : nullptr, format, scale};
    if (has_tiles_) cast_tiles_fp8(tiles(straight), tiles(transposed), format, Fp8Units::tiles, x, rows, columns, stream_);
    else if (transposed) cast_transpose_fp8(whole, transposed->codes, x, rows, columns, stream_);
    else cast_fp8(whole, x, size_t(rows) * columns, stream_);
  }

  // A scale with the maximum of x (rows,columns).
  Fp8Scale* scale_of(const Float* x, int rows, int columns) {
    const size_t count = size_t(rows) * columns;
    const auto known = known_.find(x);
    if (known != known_.end() && known->second.count == count) return known->second.scale;
    Fp8Scale* const scale = take();
    fp8_maximum(&scale->maximum, x, count, stream_);
    return scale;
  }

  Fp8Scale* take() {
    if (next_ == end_) throw std::logic_error("a pass has more maxima than memory was laid out for");
    return next_++;
  }

  Fp8Format gradients_;
  bool has_tiles_;
  cudaStream_t stream_;
  Place straight_, transposed_;
  bool has_transposed_ = false;  // is the gradient of the last input_gradient() in transposed_?
  Fp8Scale* scales_ = nullptr;                       // (slots + 1, most): of forward in each slot, and of other passes
  Fp8Scale *next_ = nullptr, *end_ = nullptr;        // of the pass under way
  int slots_ = 0;
  size_t most_ = 0;
  std::map<const Float*, Known> known_;  // by tensor
};
