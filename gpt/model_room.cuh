// How a room takes part in the computations of a model. A folder of extensions/ or runtime/ with a file model.cuh has a function
// template in it, called NAME_model, which is given the parts of the model. If the options ask for the room, it puts its own in the
// place of some of them, and returns the memory that these need; dev/make/rooms.sh writes the list. The functions are called in the
// order of the rooms' names, each around the parts of those before: fp8, then lora, then tensor_parallel, which cuts the rows of all;
// context_parallel, then generation. A room may keep references to options, mesh, memory, table and context, which live as long.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "gpt/attention.cuh"
#include "gpt/block_inputs.cuh"
#include "gpt/ends.cuh"
#include "gpt/links.cuh"
#include "gpt/model_options.h"
#include "gpt/products.cuh"
#include "gpt/weight_gradients.cuh"

template <class Float>
struct ModelParts {
  const ModelOptions& options;
  Mesh& mesh;
  DeviceMemory& memory;
  PinnedMemory& host_memory;
  const std::vector<TensorRow>& block;  // the tensors of a block
  UnitInUse<Float>& table;              // the unit of the embedding
  AttentionSizes largest_attention;     // of this rank's rows and heads, in the largest micro-batch
  // A room may put its own in the place of these, and of context.products and context.trained.
  LayerContext<Float>& context;
  AttentionOfRows<Float>*& attention;
  AttentionKernels<Float>*& kernels;  // of attention, for 16-bit types; null: ours for all GPUs, or a library's
  Embedding<Float>*& embedding;
  Head<Float>*& head;
  BlockInputs<Float>*& inputs;
  WeightGradients<Float>*& later;
  Links<Float>*& links;  // null: there are none
};

// The functions own the parts that the room has put into the model.
struct ModelRoom {
  const char* memory;                                // the name of its memory, if it lays out some
  std::function<void(Arena&)> lay_out = {};          // for the largest micro-batch; none: it needs no memory
  std::function<void()> clear = [] {};               // it has been allocated
  std::function<void()> merge = [] {};               // merges the parameters trained beside the model's weights into them, on one rank
  std::function<void(Arena&)> lay_out_on_host = {};  // as lay_out, in the host's memory
};
