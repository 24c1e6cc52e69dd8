// The list of parameters: the only description of the model's tensors. The model takes its pointers from it, and
// initialisation, optimizer, ZeRO, checkpoints and the memory plan read it.
//
// Tensors are grouped into *units*, which are stored as one contiguous padded buffer each: unit 0 is the embedding,
// units 1..L are the blocks, unit L+1 is the final norm. Inside a unit the matrices come first, so that one comparison
// with the unit's `decayed` count tells whether an element has weight decay.
#pragma once

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel/model_shape.h"

enum class Initial { normal, residual_normal, zero, one };

// The number of each tensor in its unit, for the three kinds of unit. TensorList has their names and shapes.
enum EmbeddingTensor { wte, wpe };
enum BlockTensor {
  qkv_weight, projection_weight, up_weight, down_weight,
  qkv_bias, projection_bias, up_bias, down_bias,
  norm1_weight, norm1_bias, norm2_weight, norm2_bias
};
enum FinalNormTensor { final_norm_weight, final_norm_bias };

struct TensorDescriptor {
  std::string name;           // Hugging Face's name, without "transformer."
  std::vector<size_t> shape;  // of the unpadded tensor; weights of linear layers are (in, out)
  Initial initial;
  int unit;
  size_t offset;  // from the start of the unit, in elements

  size_t count() const {
    size_t product = 1;
    for (size_t extent : shape) product *= extent;
    return product;
  }
  bool decays() const { return shape.size() == 2; }
};

struct Unit {
  size_t offset;   // from the start of the model, in elements
  size_t count;    // number of elements, padding included
  size_t decayed;  // the first so many elements have weight decay, the others have none
  size_t first_tensor;
};

class TensorList {
 public:
  static constexpr size_t alignment = 64;  // elements; so every tensor starts on a cache line in any dtype

  explicit TensorList(const ModelShape& shape) : shape_(shape) {
    const size_t C = size_t(shape.channels), V = size_t(shape.vocabulary), P = size_t(shape.positions);
    add_unit("", {{wte, "wte.weight", {V, C}, Initial::normal, size_t(shape.padded_vocabulary())},
                  {wpe, "wpe.weight", {P, C}, Initial::normal}});
    for (int layer = 0; layer < shape.layers; ++layer)
      add_unit("h." + std::to_string(layer) + ".",
               {{qkv_weight, "attn.c_attn.weight", {C, 3 * C}, Initial::normal},
                {projection_weight, "attn.c_proj.weight", {C, C}, Initial::residual_normal},
                {up_weight, "mlp.c_fc.weight", {C, 4 * C}, Initial::normal},
                {down_weight, "mlp.c_proj.weight", {4 * C, C}, Initial::residual_normal},
                {qkv_bias, "attn.c_attn.bias", {3 * C}, Initial::zero},
                {projection_bias, "attn.c_proj.bias", {C}, Initial::zero},
                {up_bias, "mlp.c_fc.bias", {4 * C}, Initial::zero},
                {down_bias, "mlp.c_proj.bias", {C}, Initial::zero},
                {norm1_weight, "ln_1.weight", {C}, Initial::one},
                {norm1_bias, "ln_1.bias", {C}, Initial::zero},
                {norm2_weight, "ln_2.weight", {C}, Initial::one},
                {norm2_bias, "ln_2.bias", {C}, Initial::zero}});
    add_unit("", {{final_norm_weight, "ln_f.weight", {C}, Initial::one},
                  {final_norm_bias, "ln_f.bias", {C}, Initial::zero}});
  }

  const ModelShape& shape() const { return shape_; }
  const std::vector<TensorDescriptor>& tensors() const { return tensors_; }
  const std::vector<Unit>& units() const { return units_; }
  // The first tensor of a unit; the others follow it.
  const TensorDescriptor* tensors_of(int unit) const { return &tensors_[units_[size_t(unit)].first_tensor]; }
  const TensorDescriptor& find(const std::string& name) const {
    for (const TensorDescriptor& tensor : tensors_)
      if (tensor.name == name) return tensor;
    throw std::out_of_range("the model has no tensor " + name);
  }
  size_t padded_count() const { return padded_count_; }  // elements of the whole model in memory
  size_t parameters() const { return parameters_; }      // Ψ: padding excluded

  // The tensor's offset from the start of the model, in elements.
  size_t offset(const TensorDescriptor& tensor) const { return units_[tensor.unit].offset + tensor.offset; }

  // Standard deviation of a tensor's initial values (GPT-2: residual projections scaled by 1/√(2L)).
  float standard_deviation(const TensorDescriptor& tensor) const {
    return tensor.initial == Initial::residual_normal ? 0.02f / std::sqrt(2.0f * float(shape_.layers)) : 0.02f;
  }

 private:
  struct Row {
    int number;  // of the tensor in its unit
    const char* name;
    std::vector<size_t> shape;
    Initial initial;
    size_t rows_in_memory = 0;  // 0: as many as the shape has
  };

  void add_unit(const std::string& prefix, const std::vector<Row>& rows) {
    Unit unit = {padded_count_, 0, 0, tensors_.size()};
    for (const Row& row : rows) {
      if (row.number != &row - rows.data()) throw std::logic_error("tensors.h: " + prefix + row.name + " is out of order");
      tensors_.push_back({prefix + row.name, row.shape, row.initial, int(units_.size()), unit.count});
      const TensorDescriptor& tensor = tensors_.back();
      const size_t count = row.rows_in_memory ? row.rows_in_memory * row.shape[1] : tensor.count();
      unit.count += (count + alignment - 1) / alignment * alignment;
      if (tensor.decays()) unit.decayed = unit.count;
      parameters_ += tensor.count();
    }
    units_.push_back(unit);
    padded_count_ += unit.count;
  }

  ModelShape shape_;
  std::vector<TensorDescriptor> tensors_;
  std::vector<Unit> units_;
  size_t padded_count_ = 0, parameters_ = 0;
};

// Pointers to the tensors of one unit, whose first element is at `data`. For example, w[qkv_weight] is the pointer to
// the weight of qkv. E is the storage type (const for weights), or float for gradients.
template <class E>
struct UnitTensors {
  E* data;
  const TensorDescriptor* tensors;  // TensorList::tensors_of
  E* operator[](int number) const { return data + tensors[number].offset; }
};
