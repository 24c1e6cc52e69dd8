// Products in eight bits (--fp8): casts activations and gradients, each with a scale of its own, and multiplies them with
// the matrices of fp8.cuh. A launch that writes such a tensor asks for the place of its maximum; it is known until a pass of the
// same slot begins, so backward does not look for the maxima of forward again.
//
// With --fp8-scale tiles (extensions/fp8/kernels/fp8_tiles.cuh) each cast finds the maxima of its tiles by itself, and nobody
// asks for one.
//
// A scale is that of the rows that a product multiplies on this rank. Data-parallel and context-parallel ranks
// each have their own, as they have other rows; so has each piece of rows that tensor parallelism sends (--tp-pieces),
// and each rank's part of a split weight. So no scale travels (but of weights that ZeRO 3 gathers as codes), and ranks that
// must hold the same weights cast the same codes from them.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>

#include "extensions/fp8/fp8.cuh"
#include "extensions/fp8/kernels/matmul_fp8.cuh"
#include "gpt/model_options.h"
#include "gpt/products.cuh"
#include "kernels/column_sum.cuh"

template <class Float>
class Fp8Products final : public WrappedProducts<Float> {
 public:
  using typename Products<Float>::Weights;
  // inner: multiplies where a block is not in eight bits
  Fp8Products(LayerContext<Float>& context, Products<Float>& inner, Fp8Weights<Float>& matrices, const ModelOptions& options)
      : WrappedProducts<Float>(context, inner), matrices_(matrices), gradients_(options_of<Fp8Options>(options.store.rooms).gradients),
        has_tiles_(options_of<Fp8Options>(options.store.rooms).tiles), slots_(size_t(options.slots)), pieces_(size_t(options.tp_pieces)) {}

  // For the codes of a product's operands, and for the maxima of forward in each slot and of another pass
  void lay_out(Arena& arena) {
    const int rows = on_.R, columns = std::max(4 * on_.c(), on_.C());  // of the largest matrix that is cast
    for (Place* place : {&straight_, &transposed_}) {
      place->memory.codes = arena.take<uint8_t>(size_t(rows) * columns);
      if (has_tiles_)
        place->memory.units = arena.take<float>(std::max(fp8_tile_units(rows, columns), fp8_tile_units(columns, rows)));
    }
    if (has_tiles_) return;
    // Backward of a block, which may recompute, asks for 10 maxima of whole tensors, and 9 in pieces; one is the final norm's.
    most_ = (10 + 9 * pieces_) * size_t(on_.list.most_layers()) + 1;
    scales_ = arena.take<Fp8Scale>((slots_ + 1) * most_);
  }

  // Forward of a slot, whose maxima are known until its next one; or, without a slot, another pass, whose
  // maxima are known until any such pass begins. (Launches may be recorded, so the tensors of a pass have the same scales
  // each time.)
  void begin(std::optional<int> slot) override {
    if (!scales_) return;
    next_ = scales_ + (slot ? size_t(*slot) : slots_) * most_, end_ = next_ + most_;
    std::erase_if(known_, [&](const auto& known) { return next_ <= known.second.scale && known.second.scale < end_; });
    CUDA_CHECK(cudaMemsetAsync(next_, 0, most_ * sizeof(Fp8Scale), on_.stream));
  }

  float* maximum_of(const Float* tensor, size_t count) override {
    if (!scales_) return nullptr;
    Fp8Scale* const scale = take();
    known_[tensor] = {scale, count};
    return &scale->maximum;
  }
  void forget_maximum(const Float* tensor, size_t count) override {
    known_.erase(known_.lower_bound(tensor), known_.lower_bound(tensor + count));
  }
  void find_maximum(const Float* tensor, size_t count) override {
    if (float* const maximum = maximum_of(tensor, count)) fp8_maximum(maximum, tensor, count, on_.stream);
  }

  void forward(Float* out, const Float* x, const Weights& of, const Float* bias, int rows) override {
    if (!changes(of)) return inner_.forward(out, x, of, bias, rows);
    cast(&straight_, nullptr, x, Fp8Format::e4m3, rows, of.inputs);
    matmul_fp8("matmul_forward", out, straight_.matrix, codes(of, true), bias,
               {.m = rows, .n = of.outputs, .k = of.inputs, .transpose_b = true, .fast_sums = !has_tiles_}, on_.stream);
  }

  // If the weight gradient comes next, dout is transposed for it at the same time, which needs one scale for all rows.
  void input_gradient(Float* dx, const Float* dout, const Weights& of, int rows) override {
    if (!changes(of)) return inner_.input_gradient(dx, dout, of, rows);
    has_transposed_ = rows == on_.R && on_.weight_gradients_follow;
    cast(&straight_, has_transposed_ ? &transposed_ : nullptr, dout, gradients_, rows, of.outputs);
    matmul_fp8<Float>("matmul_input_gradient", dx, straight_.matrix, codes(of, false), nullptr,
                      {.m = rows, .n = of.inputs, .k = of.outputs, .transpose_b = true}, on_.stream);
  }

  void weight_gradient(const Float* dout, const Float* x, const Weights& of, int rows, bool follows) override {
    if (!changes(of)) return inner_.weight_gradient(dout, x, of, rows, follows);
    float *const weight = of.unit.gradient(of.weight), *const bias = of.unit.gradient(of.bias);
    const bool adds = of.unit.accumulates();
    if (!follows || !has_transposed_) cast(nullptr, &transposed_, dout, gradients_, rows, of.outputs);
    cast(nullptr, &straight_, x, Fp8Format::e4m3, rows, of.inputs);
    matmul_fp8("matmul_weight_gradient", weight, straight_.matrix, transposed_.matrix, nullptr,
               {.m = of.inputs, .n = of.outputs, .k = rows, .transpose_b = true, .accumulate = adds}, on_.stream);
    has_transposed_ = false;
    if (bias) column_sum(bias, dout, rows, of.outputs, adds, on_.reductions, on_.stream);
  }

 private:
  using Products<Float>::on_;
  using WrappedProducts<Float>::inner_;

  bool changes(const Weights& of) const override { return matrices_.has(of.unit.number()); }
  Fp8Matrix codes(const Weights& of, bool transposed) { return matrices_.matrix(of.unit.number(), of.weight, transposed); }

  struct Known {
    Fp8Scale* scale;
    size_t count;  // elements that the maximum is of
  };

  // Memory for a matrix in eight bits, and the one that has been cast to it last.
  struct Place {
    Fp8TileCast memory;  // units: of tiles
    Fp8Matrix matrix;
  };

  // Casts x (rows,columns) to `straight`, and its transpose to `transposed`; null: not wanted.
  void cast(Place* straight, Place* transposed, const Float* x, Fp8Format format, int rows, int columns) {
    Fp8Scale* const scale = has_tiles_ ? nullptr : scale_of(x, rows, columns);
    const auto memory_of = [&](Place* place) {
      if (!place) return Fp8TileCast{};
      const auto& [codes, units] = place->memory;
      place->matrix = has_tiles_ ? Fp8Matrix{codes, format, units, Fp8Units::tiles} : Fp8Matrix{codes, format, &scale->unit};
      return place->memory;
    };
    const Fp8TileCast to = memory_of(straight), to_transposed = memory_of(transposed);
    if (has_tiles_) cast_tiles_fp8(to, to_transposed, format, Fp8Units::tiles, x, rows, columns, on_.stream);
    else if (transposed) cast_transpose_fp8({to.codes, format, scale}, to_transposed.codes, x, rows, columns, on_.stream);
    else cast_fp8({to.codes, format, scale}, x, size_t(rows) * columns, on_.stream);
  }

  // A scale with the maximum of x (rows,columns).
  Fp8Scale* scale_of(const Float* x, int rows, int columns) {
    const size_t count = size_t(rows) * columns;
    const auto known = known_.find(x);
    if (known != known_.end() && known->second.count == count) return known->second.scale;
    Fp8Scale* const scale = take();
    fp8_maximum(&scale->maximum, x, count, on_.stream);
    return scale;
  }

  Fp8Scale* take() {
    if (next_ == end_) throw std::logic_error("a pass has more maxima than memory was laid out for");
    return next_++;
  }

  Fp8Weights<Float>& matrices_;
  Fp8Format gradients_;
  bool has_tiles_;
  size_t slots_, pieces_;  // of forward's activations; of rows (--tp-pieces)
  size_t most_ = 0;        // maxima of a pass
  Place straight_, transposed_;
  bool has_transposed_ = false;  // is the gradient of the last input_gradient() in transposed_?
  Fp8Scale* scales_ = nullptr;                       // (slots + 1, most): of forward in each slot, and of other passes
  Fp8Scale *next_ = nullptr, *end_ = nullptr;        // of the pass under way
  std::map<const Float*, Known> known_;  // by tensor
};
