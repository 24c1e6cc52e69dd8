// Checkpoints: OUT/step_00000100/ holds a model after 100 steps, in public formats and as global tensors,
// so that it depends neither on the mesh nor on the program that wrote it:
//
//   model.safetensors      fp32 weights (the masters, where there are any) under Hugging Face's GPT-2 names
//                          ("transformer.h.0.ln_1.weight"); the output head is tied to wte and not stored
//   config.json            transformers' GPT2LMHeadModel.from_pretrained loads it together with model.safetensors
//   optimizer.safetensors  AdamW's moments, "m.NAME" and "v.NAME" for every NAME of model.safetensors; with --delay also
//                          the gradients that wait for the next step, "g.NAME"
//   errors.safetensors     with --compress, the parts of gradients that messages left out (runtime/checkpoints/errors.h): a tensor for each
//                          copy, "e0.NAME", "e1.NAME", ...; with powersgd:R also the factors Q, "q0.NAME", (R, columns)
//   outer.safetensors      of --local-steps: the momentum of outer steps, "o.NAME"; and with several islands
//   optimizer_island_1.safetensors, ...    the moments of the others, "island_1.m.NAME"
//   trainer.json           all else that a resumed run needs: step, sample position, options, a checksum of the data, the
//                          guard, the loss scale, and the choices for products
//   adapter_model.safetensors and adapter_config.json   with --lora-rank, in the place of the first two: A and B of
//                          each adapter, "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", as PEFT saves
//                          them. The model beside which they stand is in another folder, whose checksum is recorded
//   manifest_*             which part of these files each rank wrote, with checksums (runtime/checkpoints/manifest.h)
//
// The folder is written under a name that ends with .partial, and renamed when all of it is on disk
// (runtime/checkpoints/checkpoint_writer.h). Weights to start from may come from any GPT-2 folder, in one file or in
// several.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "gpt/model_config.h"
#include "gpt/parameters.h"
#include "gpt/safetensors.h"

// Which states there are, and which of them a rank saves: all islands have the same weights (extensions/islands/islands.cuh), which the
// first one saves, and each has moments of its own.
struct SavedStates {
  int island = 0, islands = 1;
  bool has_outer = false;  // the momentum of outer steps
  bool waits = false;      // gradients that wait for the next step (--delay)

  std::vector<State> of_optimizer() const;  // in the file of an island's moments
  std::vector<State> own() const;
  // Those of a block.
  std::vector<State> of(const CheckpointBlock& block) const;
};

// The prefix of a state's tensor names in files: "transformer.", "m.transformer.", ...; of errors and factors with
// the number of the copy, "e0.transformer.", ...; of adapters "base_model.model.transformer.", ...; of another island's
// moments "island_1.m.transformer.", ...
std::string file_prefix(State state, const TensorList& list, int copy = CheckpointBlock::none, int island = 0);

// The files of these tensors' weights begin with it: "model", or "adapter_model".
std::string file_stem(const TensorList& list);
std::string optimizer_stem(int island);  // and of an island's moments

// The files of a folder that describe a tokenizer, and how texts begin and end.
constexpr const char* tokenizer_files[] = {
    "vocab.json", "merges.txt", "encoder.json", "vocab.bpe", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "generation_config.json", "chat_template.jinja"};

struct Checkpoint {
  size_t step;
  std::filesystem::path folder;
};

std::string checkpoint_name(size_t step);

// ---- reading ----------------------------------------------------------------------------------------------

// STEM.safetensors, or the files that STEM.safetensors.index.json lists; none if the folder has neither.
std::vector<std::filesystem::path> find_tensor_files(const std::filesystem::path& folder, const std::string& stem);

// The files of a folder's weights. Fails if there are none.
std::vector<std::filesystem::path> find_weight_files(const std::filesystem::path& folder, const std::string& stem = "model");

// Load the elements that this rank keeps: of the weights, from any GPT-2 folder; of the moments, with the gradients
// that wait for the next step, if there are any; and of the outer momentum. The files hold whole tensors, so they fit any mesh:
// Parameters::kept_slices(), read_blocks() and copy_in(), block by block. A block with elements of other ranks has at most
// `most` elements.
void load_weights(const std::filesystem::path& folder, Parameters& parameters, size_t most = most_at_once);
void load_optimizer(const std::filesystem::path& folder, Parameters& parameters, const SavedStates& states = {}, size_t most = most_at_once);
void load_outer_momentum(const std::filesystem::path& folder, Parameters& parameters);
nlohmann::json load_trainer(const std::filesystem::path& folder);
