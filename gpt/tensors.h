// The list of parameters: the only description of the model's tensors. The model takes its pointers from it, and
// initialisation, optimizer, ZeRO, checkpoints and the memory plan read it.
//
// Tensors are grouped into *units*, which are stored as one contiguous padded buffer each: unit 0 is the embedding,
// units 1..L are the blocks, unit L+1 is the final norm. Inside a unit the matrices come first, so that one comparison
// with the unit's `decayed` count tells whether an element has weight decay.
//
// Tensor parallelism (extensions/tensor_parallel/tensor_parallel.cuh) splits a tensor in one of three ways:
//
//   split    each of the tp ranks has its part: rows of a matrix, or columns, or values of a vector. The columns of
//            c_attn are three blocks, q, k and v, of which a rank has the columns of its heads
//   whole    every rank has the tensor, and computes the same gradient
//   summed   every rank has the tensor, but computes the gradient of its own rows: the sum over the ranks is the gradient
//
// In a unit they come in this order, so that a range says which elements one rank has to answer for.
//
// Pipeline parallelism gives a rank some of the layers (gpt/actions.h). Units of other ranks are in the list,
// too, so that all ranks number and name everything alike, but they have no elements here. The embedding is a unit of
// the first stage and of the last one, whose head needs wte. There wpe has its place in the unit, so that both stages
// cut it into the same pieces, but no elements.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpt/shapes.h"
#include "kernels/device/part.h"

enum class Initial { normal, residual_normal, uniform, zero, one };

// The number of each tensor in its unit, for the three kinds of unit. TensorList has their names and shapes.
enum EmbeddingTensor { wte, wpe };
enum BlockTensor {
  qkv_weight, projection_weight, up_weight, down_weight, qkv_bias, up_bias,  // split
  projection_bias, down_bias,                                                // whole
  norm1_weight, norm1_bias, norm2_weight, norm2_bias                         // summed
};
enum FinalNormTensor { final_norm_weight, final_norm_bias };  // summed

// How tensor parallelism treats a tensor.
struct Split {
  int axis = -1;        // it is split along this axis of its shape; -1: it is not
  int blocks = 1;       // equal blocks of the axis, each of which is split (q, k and v)
  bool summed = false;  // its gradient is summed over the ranks
};

struct TensorDescriptor {
  std::string name;           // Hugging Face's name, without "transformer."
  std::vector<size_t> shape;  // of the whole tensor, unpadded; weights of linear layers are (in, out)
  Initial initial;
  int unit;
  size_t offset;  // from the start of the unit, in elements
  Split split;
  Part part;      // which elements of the whole tensor this rank has
  size_t local;   // how many these are, padding left out; 0 if the tensor is another stage's

  size_t count() const { return element_count(shape); }  // of the whole tensor
  bool decays() const { return shape.size() == 2; }
  bool is_whole() const { return split.axis < 0 && !split.summed; }  // have tensor-parallel ranks the same gradient of it?
};

// All are numbers of elements on this rank, padding included.
struct Unit {
  size_t count;
  size_t decayed;  // the elements before this one have weight decay, the others have none
  size_t split;    // the elements before this one belong to split tensors
  size_t summed;   // the elements from this one on belong to summed tensors
  size_t first_tensor;
};

// A tensor of a unit, as it is declared.
struct TensorRow {
  int number;  // of the tensor in its unit
  std::string name;
  std::vector<size_t> shape;
  Initial initial;
  Split split;
  bool is_vocabulary = false;  // its rows are tokens
};
namespace split_by {
inline constexpr Split rows = {.axis = 0}, columns = {.axis = 1}, values = {.axis = 0}, nothing = {}, sums = {.summed = true},
                       qkv_columns = {.axis = 1, .blocks = 3}, qkv_values = {.axis = 0, .blocks = 3};
}

// The tensors of a GPT-2 block with C channels.
inline std::vector<TensorRow> block_tensors(size_t C) {
  using namespace split_by;
  return {{qkv_weight, "attn.c_attn.weight", {C, 3 * C}, Initial::normal, qkv_columns},
          {projection_weight, "attn.c_proj.weight", {C, C}, Initial::residual_normal, rows},
          {up_weight, "mlp.c_fc.weight", {C, 4 * C}, Initial::normal, columns},
          {down_weight, "mlp.c_proj.weight", {4 * C, C}, Initial::residual_normal, rows},
          {qkv_bias, "attn.c_attn.bias", {3 * C}, Initial::zero, qkv_values},
          {up_bias, "mlp.c_fc.bias", {4 * C}, Initial::zero, values},
          {projection_bias, "attn.c_proj.bias", {C}, Initial::zero, nothing},
          {down_bias, "mlp.c_proj.bias", {C}, Initial::zero, nothing},
          {norm1_weight, "ln_1.weight", {C}, Initial::one, sums},
          {norm1_bias, "ln_1.bias", {C}, Initial::zero, sums},
          {norm2_weight, "ln_2.weight", {C}, Initial::one, sums},
          {norm2_bias, "ln_2.bias", {C}, Initial::zero, sums}};
}
using BlockTensors = std::vector<TensorRow> (*)(size_t channels);

class TensorList {
 public:
  // Tensors begin at multiples of so many elements: on a cache line in any dtype; beside tensor-parallel ranks with a run of
  // codes, too (compressed_reduction.cuh).
  size_t alignment() const { return tp_ == 1 ? 64 : run_of_codes; }
  static constexpr size_t run_of_codes = 256;

  // tp, tp_rank: the number of tensor-parallel ranks, which divides the number of heads, and this rank among them.
  // chunks: the layers of this rank, from first to last; none: all layers.
  explicit TensorList(const ModelShape& shape, int tp = 1, int tp_rank = 0, std::vector<Layers> chunks = {},
                      BlockTensors of_block = block_tensors)
      : shape_(shape), tp_(tp), tp_rank_(tp_rank), chunks_(std::move(chunks)) {
    if (chunks_.empty()) chunks_.push_back({0, shape.layers});
    const size_t C = size_t(shape.channels), V = size_t(shape.vocabulary), P = size_t(shape.positions);
    add_unit("", {{wte, "wte.weight", {V, C}, Initial::normal, split_by::rows, true},
                  {wpe, "wpe.weight", {P, C}, Initial::normal, split_by::nothing}});
    if (!has(tensors_[wpe])) tensors_[wpe].local = 0;
    for (int layer = 0; layer < shape.layers; ++layer) add_unit("h." + std::to_string(layer) + ".", of_block(C));
    add_unit("", {{final_norm_weight, "ln_f.weight", {C}, Initial::one, split_by::sums},
                  {final_norm_bias, "ln_f.bias", {C}, Initial::zero, split_by::sums}});
  }

  // The adapters of another list's blocks (lora.h); its embedding and its final norm have none.
  TensorList(const TensorList& base, const std::vector<TensorRow>& of_block)
      : shape_(base.shape_), tp_(base.tp_), tp_rank_(base.tp_rank_), chunks_(base.chunks_), is_adapters_(true) {
    for (int unit = 0; unit <= base.final_norm_unit(); ++unit)
      add_unit("h." + std::to_string(unit - 1) + ".", is_block(unit) ? of_block : std::vector<TensorRow>());
  }

  bool is_adapters() const { return is_adapters_; }
  int tp() const { return tp_; }
  int tp_rank() const { return tp_rank_; }

  // Rows of wte in this rank's memory, the same number on every tensor-parallel rank: a multiple of 128, so that the
  // tiles of the model's largest matrix product are all full.
  int vocabulary_rows() const {
    const int share = (shape_.vocabulary + tp_ - 1) / tp_;
    return (share + 127) / 128 * 128;
  }
  // The tokens whose rows of wte this rank has. The last ranks may have none.
  VocabularyShard vocabulary() const {
    const int rows = vocabulary_rows(), first = std::min(tp_rank_ * rows, shape_.vocabulary);
    return {first, std::min(rows, shape_.vocabulary - first)};
  }

  const ModelShape& shape() const { return shape_; }
  const std::vector<Layers>& chunks() const { return chunks_; }
  int most_layers() const { return std::ranges::max(chunks_, {}, &Layers::count).count; }  // of a chunk
  bool is_first_stage() const { return chunks_.front().first == 0; }
  bool is_last_stage() const { return chunks_.back().end() == shape_.layers; }
  int final_norm_unit() const { return shape_.layers + 1; }
  bool is_block(int unit) const { return unit > 0 && unit < final_norm_unit(); }
  // Does a chunk begin with the embedding, or end with the head?
  bool needs_tokens(int chunk) const {
    const Layers& layers = chunks_[size_t(chunk)];
    return layers.first == 0 || layers.end() == shape_.layers;
  }
  // Has this rank elements of the unit?
  bool has(int unit) const {
    if (is_adapters_ && !is_block(unit)) return false;
    if (unit == 0) return is_first_stage() || is_last_stage();
    if (unit == final_norm_unit()) return is_last_stage();
    return std::any_of(chunks_.begin(), chunks_.end(),
                       [&](const Layers& chunk) { return chunk.first < unit && unit <= chunk.end(); });
  }

  // Has this stage the tensor? Of the embedding the last one has wte alone.
  bool has(const TensorDescriptor& tensor) const { return tensor.unit == 0 && &tensor == &tensors_[wpe] ? is_first_stage() : has(tensor.unit); }

  bool is_wte(const TensorDescriptor& tensor) const { return tensor.unit == 0 && tensor.name == tensors_[wte].name; }

  const std::vector<TensorDescriptor>& tensors() const { return tensors_; }
  const std::vector<Unit>& units() const { return units_; }
  // The first tensor of a unit; the others follow it.
  const TensorDescriptor* tensors_of(int unit) const { return &tensors_[units_[size_t(unit)].first_tensor]; }
  const TensorDescriptor& find(const std::string& name) const {
    for (const TensorDescriptor& tensor : tensors_)
      if (tensor.name == name) return tensor;
    throw std::out_of_range("the model has no tensor " + name);
  }
  size_t parameters() const { return parameters_; }  // Ψ of the whole model: padding excluded

  // Standard deviation of a tensor's initial values (GPT-2: residual projections scaled by 1/√(2L); PEFT draws A from
  // Kaiming's uniform distribution with a = √5, which is between -1/√inputs and 1/√inputs).
  float standard_deviation(const TensorDescriptor& tensor) const {
    if (tensor.initial == Initial::uniform) return 1 / std::sqrt(3.0f * float(tensor.shape[1]));
    return tensor.initial == Initial::residual_normal ? 0.02f / std::sqrt(2.0f * float(shape_.layers)) : 0.02f;
  }

 private:
  // Which elements of the tensor this rank has, and how many.
  void cut(TensorDescriptor& tensor, bool is_vocabulary) const {
    const Split& split = tensor.split;
    tensor.part = {};
    tensor.local = tensor.count();
    if (tp_ == 1 || split.axis < 0) return;
    size_t inner = 1;  // elements of one index of the axis
    for (size_t axis = size_t(split.axis) + 1; axis < tensor.shape.size(); ++axis) inner *= tensor.shape[axis];
    if (is_vocabulary) {
      tensor.local = size_t(vocabulary().rows) * inner;
      tensor.part.first = size_t(vocabulary().first) * inner;
      return;
    }
    const size_t block = tensor.shape[size_t(split.axis)] / size_t(split.blocks) * inner, width = block / size_t(tp_);
    tensor.local /= size_t(tp_);
    tensor.part = {width, block, size_t(tp_rank_) * width};
  }

  void add_unit(const std::string& prefix, const std::vector<TensorRow>& rows) {
    Unit unit = {0, 0, 0, 0, tensors_.size()};
    const bool is_here = has(int(units_.size()));
    for (const TensorRow& row : rows) {
      if (row.number != &row - rows.data()) throw std::logic_error("tensors.h: " + prefix + row.name + " is out of order");
      tensors_.push_back({prefix + row.name, row.shape, row.initial, int(units_.size()), unit.count, row.split, {}, 0});
      TensorDescriptor& tensor = tensors_.back();
      cut(tensor, row.is_vocabulary);
      parameters_ += tensor.count();
      if (!is_here) {
        tensor.local = 0;
        continue;
      }
      const size_t count = row.is_vocabulary ? size_t(vocabulary_rows()) * row.shape[1] : tensor.local;
      unit.count += (count + alignment() - 1) / alignment() * alignment();
      if (tensor.decays()) unit.decayed = unit.count;
      if (tensor.split.axis >= 0) unit.split = unit.count;
      if (!tensor.split.summed) unit.summed = unit.count;
    }
    units_.push_back(unit);
  }

  ModelShape shape_;
  int tp_, tp_rank_;
  std::vector<Layers> chunks_;
  bool is_adapters_ = false;
  std::vector<TensorDescriptor> tensors_;
  std::vector<Unit> units_;
  size_t parameters_ = 0;
};
