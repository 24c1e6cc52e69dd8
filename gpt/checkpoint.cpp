#include "gpt/checkpoint.h"

#include <iterator>
#include <set>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/json_fields.h"
#include "gpt/base/text.h"
#include "gpt/tensor_files.h"

namespace {

// The files that an index lists, {"weight_map": {"TENSOR": "FILE", ...}}. They lie in the same folder.
std::vector<std::filesystem::path> files_of_index(const std::filesystem::path& index) {
  std::set<std::filesystem::path> files;
  const nlohmann::json json = read_json_object(index);
  if (!json.contains("weight_map") || !json["weight_map"].is_object()) fail(index, ": has no weight_map: get it again");
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (!is_file_name(name))
      fail(index, ": ", excerpt(tensor), " lies in ", excerpt(file.dump()), ", not a file of this folder: get it again");
    files.insert(index.parent_path() / name);
  }
  return {files.begin(), files.end()};
}

}  // namespace

std::vector<State> SavedStates::of_optimizer() const {
  std::vector<State> states = {std::begin(optimizer_states), std::end(optimizer_states)};
  if (waits) states.push_back(State::gradient);
  return states;
}

std::vector<State> SavedStates::own() const {
  std::vector<State> states = of_optimizer();
  if (island == 0 && has_outer) states.insert(states.begin(), State::outer_momentum);
  if (island == 0) states.insert(states.begin(), State::weight);
  return states;
}

std::vector<State> SavedStates::of(const CheckpointBlock& block) const {
  return block.copy == CheckpointBlock::none ? own() : std::vector{block.state};
}

std::string file_prefix(State state, const TensorList& list, int copy, int island) {
  return state_prefix(state, copy, island) + (list.is_adapters() ? "base_model.model." : "") + "transformer.";
}
std::string optimizer_stem(int island) { return island ? concat("optimizer_island_", island) : "optimizer"; }
std::string file_stem(const TensorList& list) { return list.is_adapters() ? "adapter_model" : "model"; }

std::string checkpoint_name(size_t step) { return formatted("step_%08zu", step); }

// ---- reading ----------------------------------------------------------------------------------------------

std::vector<std::filesystem::path> find_tensor_files(const std::filesystem::path& folder, const std::string& stem) {
  const std::filesystem::path single = folder / (stem + ".safetensors"), index = single.string() + ".index.json";
  if (std::filesystem::exists(single)) return {single};
  if (std::filesystem::exists(index)) return files_of_index(index);
  return {};
}

std::vector<std::filesystem::path> find_weight_files(const std::filesystem::path& folder, const std::string& stem) {
  const std::vector<std::filesystem::path> files = find_tensor_files(folder, stem);
  if (files.empty() && std::filesystem::exists(folder / "pytorch_model.bin"))
    fail(folder, ": holds pytorch_model.bin, a Python pickle, which this program does not read: load it "
         "with transformers and call save_pretrained, which writes model.safetensors");
  if (files.empty()) fail(folder, ": holds no ", stem, ".safetensors: give a folder in Hugging Face's GPT-2 format");
  return files;
}

void load_weights(const std::filesystem::path& folder, Parameters& parameters, size_t most) {
  const TensorList& list = parameters.shards().list();
  const int wanted = list.shape().heads, heads = list.is_adapters() ? wanted : load_shape(folder).heads;  // no tensor depends on it
  if (heads != wanted) fail(folder, ": has ", heads, " heads, the model ", wanted, ": leave out --heads");
  TensorFiles files(folder, find_weight_files(folder, file_stem(list)), ": check config.json and the files");
  files.drop_tied_head();
  files.load(parameters, {State::weight}, most);
}

static void load_states(const std::filesystem::path& folder, const std::string& stem, Parameters& parameters,
                        const std::vector<State>& states, size_t most = most_at_once, int island = 0) {
  const char* by_init = ": start from its weights with --init";
  const std::vector<std::filesystem::path> files = find_tensor_files(folder, stem);
  if (files.empty()) fail(folder, ": holds no ", stem, ".safetensors", by_init);
  TensorFiles(folder, files, by_init).load(parameters, states, most, island);
}

void load_optimizer(const std::filesystem::path& folder, Parameters& parameters, const SavedStates& states, size_t most) {
  load_states(folder, optimizer_stem(states.island), parameters, states.of_optimizer(), most, states.island);
}
void load_outer_momentum(const std::filesystem::path& folder, Parameters& parameters) {
  load_states(folder, "outer", parameters, {State::outer_momentum});
}

nlohmann::json load_trainer(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "trainer.json";
  nlohmann::json trainer = read_json_object(path);
  JsonFields(path, trainer, ": resume from another checkpoint").size("step");
  return trainer;
}
