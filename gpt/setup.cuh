// From options to a model: decides its shape and builds it.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "gpt/batches.cuh"
#include "gpt/checkpoint.h"
#include "gpt/job.cuh"
#include "gpt/model.cuh"
#include "gpt/room.h"

// The shape of the weights in the folder. Sets the sequence length if no option gives it.
inline ModelShape loaded_shape(Options& o, const std::filesystem::path& folder) {
  const ModelShape shape = load_shape(folder);
  check_loaded_shape(o, shape, folder);
  if (o.seq_len == 0) o.seq_len = shape.positions;
  return shape;
}

// The folder of the model to start from. folder: of the checkpoint, or of --init, which may hold something else beside a model that a
// room knows; empty: there is none
inline std::filesystem::path folder_of_model(Options& o, std::filesystem::path folder, bool is_checkpoint) {
  for (const Room* room : rooms())
    if (room->folder_of_model) folder = room->folder_of_model(o, folder, is_checkpoint);
  return folder;
}

// Decides o.shape. folder: holds the weights to start from, of a checkpoint or of --init; empty: there are none. A plan
// may have no data: then the vocabulary is the usual one of token shards.
inline void decide_shape(Options& o, const std::filesystem::path& folder, bool is_checkpoint, const Datasets& data) {
  const int vocabulary = data.train ? data.train->default_vocabulary() : TokenData::shards_vocabulary;
  o.shape = folder.empty() ? shape_of(o, vocabulary) : loaded_shape(o, folder);
  for (const Room* room : rooms())
    if (room->check_model && !folder.empty() && !is_checkpoint) room->check_model(folder, o, data.train && data.train->is_text());
  refuse(shape_problem(o));
  if (data.train) check_enough(o, *data.train, "--train", size_t(o.global_batch));
  for (size_t set = 0; set < data.validation.size(); ++set) {
    const size_t samples = o.val_batches * size_t(o.global_batch);
    check_enough(o, data.validation[set], "--val (" + o.val[set].first + ")", samples);
    data.validation[set].check_tokens(samples, o.seq_len, o.shape.vocabulary);
  }
}

// Only fp16 needs a loss scale.
inline LossScale loss_scale_of(const Options& o) {
  if (o.dtype != "fp16") return {};
  return {.value = float(o.loss_scale), .window = o.loss_scale_window};
}

// What rooms' parts of a model read.
inline RoomOptions values_of_rooms(const Options& o) {
  RoomOptions values = o;
  for (const Room* room : rooms())
    if (room->hand_down) room->hand_down(values, o);
  return values;
}

// samples: how many texts are generated at the same time; 0: none. On an imagined mesh the model allocates nothing, and
// may be planned for a device elsewhere.
inline std::unique_ptr<Model> build_model(const Options& o, Mesh& mesh, cudaStream_t stream, bool training, int samples,
                                          const std::optional<LibraryWorkspaces>& elsewhere = {}) {
  const Actions actions = training ? actions_of(o, mesh) : Actions();
  const int rows = int(o.rows()), chunks = o.logit_chunks ? o.logit_chunks : ceil_div(rows, 16384);
  // Without backward, blocks can share memory.
  const Recompute recompute = !training || o.recompute == "block" ? Recompute::block :
                              o.recompute == "gelu" ? Recompute::gelu : Recompute::none;
  std::unique_ptr<Model> model = make_model(
      o.dtype,
      {.shape = o.shape,
       .micro_batch = o.micro_batch,
       .seq_len = o.seq_len,
       .recompute = recompute,
       .tp_pieces = o.tp_pieces,
       .chunks = o.pp_chunks,
       .slots = std::max(slots_of(actions), 1),
       .splits_backward = std::ranges::count(actions, Work::weight, &Action::work) > 0,
       .logit_chunks = std::min(chunks, rows),
       .cached_positions = samples > 0 && !o.no_cache ? o.seq_len : 0,
       .samples = samples,
       .attention = o.attention,
       .elsewhere = elsewhere,
       .store = {.zero = o.zero,
                 .training = training,
                 .stochastic_rounding = o.stochastic_rounding,
                 .narrow_moments = o.moments == "bf16",
                 .offload = {.optimizer = o.offloads("optimizer"), .activations = o.offloads("activations"),
                             .gradients = o.offloads("gradients")},
                 .loss_scale = loss_scale_of(o),
                 .cast_gradients = o.reduce_dtype == "bf16",
                 .seed = o.seed,
                 .random_biases = o.random_biases,
                 .rooms = values_of_rooms(o)},
       .lora = o.lora},
      mesh, stream);
  if (o.attention_given && !elsewhere && !model->attention_problem().empty())
    usage_error("--attention ", o.attention, ": ", model->attention_problem(), "; leave the option out");
  return model;
}

inline std::unique_ptr<Model> build_model_to_train(const Options& o, Mesh& mesh, cudaStream_t stream,
                                                   const std::optional<LibraryWorkspaces>& elsewhere = {}) {
  return build_model(o, mesh, stream, true, o.samples_in_training() ? 1 : 0, elsewhere);
}

// Builds the model, and sets o.attention to the kernels that compute attention in it.
inline std::unique_ptr<Model> build_model_of_run(Options& o, Mesh& mesh, cudaStream_t stream) {
  std::unique_ptr<Model> model = build_model_to_train(o, mesh, stream);
  const std::string& problem = model->attention_problem();
  if (!problem.empty() && o.attention != "auto")
    std::printf("attention by other kernels than before (%s), so bits differ: %s\n", o.attention.c_str(), problem.c_str());
  o.attention = model->attention_body();  // which checkpoints store
  return model;
}
