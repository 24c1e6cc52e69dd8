// Checkpoints: OUT/step_00000100/ holds a model after 100 updates, in public formats and as global tensors,
// so that it depends neither on the mesh nor on the program that wrote it:
//
//   model.safetensors      fp32 weights under Hugging Face's GPT-2 names ("transformer.h.0.ln_1.weight"); the
//                          output head is tied to wte and not stored
//   config.json            with model.safetensors it is what transformers' GPT2LMHeadModel.from_pretrained loads
//   optimizer.safetensors  AdamW's moments, "m.NAME" and "v.NAME" for every NAME of model.safetensors
//   trainer.json           what else a resumed run needs: step, sample position, seeds, options, a checksum of the data
//   manifest_*             which part of these files each rank wrote, with checksums (runtime/manifest.h)
//
// The folder is written under a name that ends with .partial, and renamed when all of it is on disk
// (runtime/checkpoint_writer.h). Weights to start from may come from any GPT-2 folder, in one file or in several.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "kernels/update.h"
#include "parallel/blocks.h"
#include "runtime/model_config.h"
#include "runtime/safetensors.h"

// A parameter by its name without "transformer.", such as h.0.attn.c_attn.weight.
using CheckpointTensor = NamedShape;

// Neighbouring elements of a whole tensor that a rank writes or needs.
struct CheckpointSlice {
  CheckpointTensor tensor;
  size_t first, count;
  // To copy it out, the ranks of a block gather it (RankGroup::block): each has as many such slices as the others, and
  // the copies of the first, the second, ... wait for one another. None is longer than RankGroup::chunk_bytes.
  bool gathered = false;
};

// These copy one slice at a time from and to the model, so that little host memory is needed.
using CopyOut = std::function<void(const CheckpointSlice&, State, float* to)>;
using CopyIn = std::function<void(const CheckpointSlice&, State, const std::vector<float>& from)>;

// The prefix of a state's tensor names in files: "transformer.", "m.transformer.", ...
std::string file_prefix(State state);

// The content of a checkpoint: the whole model's description, and the part that this rank writes.
struct CheckpointContent {
  ModelShape shape;
  std::vector<CheckpointTensor> tensors;
  std::vector<CheckpointSlice> slices;
  CopyOut copy_out;
  std::string trainer;                          // what else a resumed run needs: a JSON object
  std::filesystem::path tokenizer_folder = {};  // may hold the tokenizer of the weights, which is then saved, too
  std::function<void()> wait = [] {};           // waits until all copies are done
};

// The model's tensors as a checkpoint stores them.
std::vector<CheckpointTensor> stored_tensors(const TensorList& list);

std::vector<CheckpointSlice> whole_tensors(const std::vector<CheckpointTensor>& tensors);

// The next two convert between the model's blocks and the slices of a checkpoint.
std::vector<CheckpointSlice> checkpoint_slices(const std::vector<Block>& blocks);

Block block_of(const TensorList& list, const CheckpointSlice& slice);

struct Checkpoint {
  size_t step;
  std::filesystem::path folder;
};

// ---- which checkpoints there are --------------------------------------------------------------------------

std::string checkpoint_name(size_t step);

// Complete checkpoints of a run, oldest first; none if the folder does not exist.
std::vector<Checkpoint> list_checkpoints(const std::filesystem::path& out);

std::optional<Checkpoint> newest_checkpoint(const std::filesystem::path& out);

// Removes what an interrupted save or removal left behind.
void remove_partial_checkpoints(const std::filesystem::path& out);

// Renames the checkpoint before it removes it, because a checkpoint that is half removed must not look complete.
void remove_checkpoint(const std::filesystem::path& folder);

// Removes all checkpoints except the newest `keep` (0: all) and those whose step is a multiple of `keep_every` (0: no
// others).
void prune_checkpoints(const std::filesystem::path& out, size_t keep, size_t keep_every);

// ---- reading ----------------------------------------------------------------------------------------------

// STEM.safetensors, or the files that STEM.safetensors.index.json lists; none if the folder has neither.
std::vector<std::filesystem::path> find_tensor_files(const std::filesystem::path& folder, const std::string& stem);

// Loads weights from any GPT-2 folder. shape: the shape that `tensors` were made for, normally load_shape(folder).
void load_weights(const std::filesystem::path& folder, const ModelShape& shape,
                  const std::vector<CheckpointTensor>& tensors, const std::vector<CheckpointSlice>& slices,
                  const CopyIn& copy_in);

void load_optimizer(const std::filesystem::path& folder, const std::vector<CheckpointTensor>& tensors,
                    const std::vector<CheckpointSlice>& slices, const CopyIn& copy_in);

nlohmann::json load_trainer(const std::filesystem::path& folder);
