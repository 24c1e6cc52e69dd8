// The matrices of blocks that multiply in eight bits (--fp8; extensions/fp8/kernels/fp8.cuh has formats and scales), as codes in
// both orientations: two bytes a parameter. Each is cast once a step, from the weights that are multiplied otherwise. But with
// ZeRO 3 there is room for one block: its codes are gathered (fp8_gathering.cuh), and transposed where a pass asks for that; or
// bf16 is gathered, and cast when the pass comes to the block. fp8_products.cuh multiplies them.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "extensions/fp8/fp8_gathering.cuh"
#include "extensions/fp8/kernels/fp8.cuh"
#include "extensions/fp8/kernels/fp8_tiles.cuh"
#include "gpt/store_room.cuh"

template <class Float>
class Fp8Weights final : public WeightGathering<Float> {
 public:
  // The gathering that is there serves the units that are not gathered as codes. With ZeRO 3, units take turns in one place.
  explicit Fp8Weights(StoreParts<Float>& parts)
      : WeightGathering<Float>(parts.shards, parts.mesh.data()), inner_(std::move(parts.gathering)), list_(parts.shards.list()),
        options_(options_of<Fp8Options>(parts.options.rooms)), has_tiles_(options_.tiles), is_ring_(parts.zero == 3),
        gathering_(parts.shards, options_, is_ring_ && !inner_->rounds() && !has_tiles_), place_(size_t(list_.final_norm_unit() + 1), none) {
    for (int unit = 1; unit < list_.final_norm_unit(); ++unit)
      if (list_.has(unit) && is_wanted(unit)) {
        if (!is_ring_ || holds_.empty()) holds_.push_back(none);
        place_[size_t(unit)] = int(holds_.size()) - 1;
        block_ = list_.units()[size_t(unit)].decayed;
        units_ = 0;
        gathers_ = gathering_.has(unit);
        for (int number = 0; number < matrices; ++number) {
          const auto [rows, columns] = shape_of(list_.tensors_of(unit)[number]);
          unit_places_[size_t(number)] = units_;
          units_ += std::max(fp8_block_units(rows, columns), fp8_block_units(columns, rows));
        }
      }
  }

  bool has(int unit) const { return place_[size_t(unit)] != none; }
  bool is_used() const { return !holds_.empty(); }

  bool rounds() const override { return inner_->rounds(); }
  size_t elements(int unit) const override {
    return gathering_.has(unit) ? shards_.whole(unit) / sizeof(Float) : inner_->elements(unit);
  }
  void add_to(DeviceMemory& memory) override {
    inner_->add_to(memory);
    if (is_used()) memory.add("fp8 weights", [this](Arena& arena) { lay_out(arena); });
  }
  void lay_out_messages(Arena& arena) override { inner_->lay_out_messages(arena); }

  void gather(int unit, Float* whole, const Float* piece, const float* exact) override {
    if (gathering_.has(unit)) gathering_.gather(unit, reinterpret_cast<uint8_t*>(whole), piece, ranks_);
    else inner_->gather(unit, whole, piece, exact);
  }

  // All are to be cast again.
  void forget() override {
    inner_->forget();
    std::ranges::fill(holds_, int(none));
    transposed_.fill(none);
    gathering_.forget();
  }
  // Are the codes of all units there?
  bool is_up_to_date() const override { return inner_->is_up_to_date() && std::ranges::count(holds_, int(none)) == 0; }

  // Casts a unit's matrices, unless that has been done since they changed.
  const Float* use(int unit, Float* weights, cudaStream_t stream) override {
    if (gathering_.has(unit)) {
      codes_[0] = reinterpret_cast<uint8_t*>(weights), stream_ = stream;
      return gathering_.around_vectors(unit);
    }
    if (!has(unit)) return inner_->use(unit, weights, stream);
    if (std::exchange(holds_[size_t(place_[size_t(unit)])], unit) == unit) return weights;
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
  // The codes of a matrix as it is stored, where they are kept.
  void visit_values(const TensorDescriptor& tensor, const Parameters::Visit& visit) const override {
    inner_->visit_values(tensor, visit);
    if (!is_ring_ && tensor.decays() && is_wanted(tensor.unit))
      visit({tensor, State::weight, "weights in eight bits", has(tensor.unit) ? at(0, tensor) - tensor.offset : nullptr, 1, false});
  }

 private:
  using WeightGathering<Float>::shards_;
  using WeightGathering<Float>::ranks_;
  static constexpr int none = -1, matrices = fp8_matrices;

  // Of all blocks of the model, those of other stages, too.
  bool is_wanted(int unit) const { return options_.has(unit - 1, list_.shape().layers); }

  void lay_out(Arena& arena) {
    for (int transposed : {0, 1})
      if (transposed || !gathers_) codes_[transposed] = arena.take<uint8_t>(holds_.size() * block_);
    if (gathers_) gathering_.lay_out(arena);
    else if (!has_tiles_) scales_ = arena.take<Fp8Scale>(holds_.size() * matrices);
    else for (float*& units : block_units_) units = arena.take<float>(holds_.size() * units_);
  }

  // Of this rank's part of a matrix.
  std::pair<int, int> shape_of(const TensorDescriptor& tensor) const {
    const int rows = int(tensor.shape[0]) / (tensor.split.axis == 0 ? list_.tp() : 1);
    return {rows, int(tensor.local / size_t(rows))};
  }

  float* units_of(bool transposed, int unit, int number) const {
    return block_units_[transposed] + size_t(place_[size_t(unit)]) * units_ + unit_places_[size_t(number)];
  }
  Fp8Scale* scales_of(int unit) const { return scales_ + size_t(place_[size_t(unit)]) * matrices; }

  uint8_t* at(bool transposed, const TensorDescriptor& tensor) const {
    return codes_[transposed] + size_t(place_[size_t(tensor.unit)]) * block_ + tensor.offset;
  }

  std::unique_ptr<WeightGathering<Float>> inner_;
  const TensorList& list_;
  Fp8Options options_;
  bool has_tiles_, is_ring_, gathers_ = false;
  Fp8Gathering<Float> gathering_;
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
