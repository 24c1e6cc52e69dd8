// The matrices of blocks that multiply in eight bits (--fp8; extensions/fp8/kernels/fp8.cuh has formats and scales), as codes in
// both orientations: two bytes a parameter. Each is cast once a step, from the weights that are multiplied otherwise. But with
// ZeRO 3 there is room for one block: its codes are gathered (fp8_gathering.cuh), and transposed where a pass asks for that; or
// bf16 is gathered, and cast when the pass comes to the block. fp8_products.cuh multiplies them.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "extensions/fp8/fp8_gathering.cuh"
#include "extensions/fp8/kernels/fp8.cuh"
#include "extensions/fp8/kernels/fp8_tiles.cuh"
#include "kernels/device/memory.cuh"

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
