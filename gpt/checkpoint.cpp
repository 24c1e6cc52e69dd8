#include "gpt/checkpoint.h"

#include <algorithm>
#include <iterator>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <system_error>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/json_fields.h"
#include "gpt/base/text.h"

namespace {

// A tensor and the file that holds it.
struct StoredTensor {
  const SafetensorsFile* file;
  const TensorInfo* tensor;
};

void check_shape(const StoredTensor& stored, const TensorDescriptor& wanted) {
  if (stored.tensor->shape == wanted.shape) return;
  fail(stored.file->path(), ": tensor ", wanted.name, " has shape ", shape_text(stored.tensor->shape),
       ", the model needs ", shape_text(wanted.shape), ": check config.json");
}

// Fails if a value is not finite. One such value makes every loss NaN: the run would leave out all updates, and save
// the same weights again. (An update leaves gradients out that are not.)
void check_finite(const StoredTensor& stored, size_t first, const std::vector<float>& values) {
  const auto bad = std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
  if (bad == values.end()) return;
  fail(stored.file->path(), ": element ", first + size_t(bad - values.begin()), " of tensor ", excerpt(stored.tensor->name),
       " is ", *bad, ": take other weights, or a checkpoint from before they broke");
}

void load_block(const StoredTensor& stored, const CheckpointBlock& block, State state, Parameters& parameters) {
  std::vector<float> values(block.count);
  stored.file->read(*stored.tensor, block.first, block.count, values.data());
  if (state != State::gradient) check_finite(stored, block.first, values);
  parameters.copy_in(block, state, values);
}

// An equal part of the sum of all copies.
void load_equal_part(const std::vector<StoredTensor>& copies, const CheckpointBlock& block, int parts, Parameters& parameters) {
  std::vector<double> sums(block.count);
  std::vector<float> values(block.count);
  for (const StoredTensor& copy : copies) {
    copy.file->read(*copy.tensor, block.first, block.count, values.data());
    check_finite(copy, block.first, values);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
  }
  for (size_t i = 0; i < sums.size(); ++i) values[i] = float(sums[i] / parts);
  parameters.copy_in(block, State::error, values);
}

// Does b hold the values of a? A tensor of 16 bits may be the other one, rounded.
bool same_values(const StoredTensor& a, const StoredTensor& b) {
  const double rounding = a.tensor->dtype == b.tensor->dtype ? 0 : 0x1p-8;
  const size_t count = element_count(a.tensor->shape);
  if (element_count(b.tensor->shape) != count) return false;
  std::vector<float> block_of_a(std::min(count, size_t(1) << 16)), block_of_b(block_of_a.size());
  for (size_t first = 0; first < count; first += block_of_a.size()) {
    const size_t now = std::min(block_of_a.size(), count - first);
    a.file->read(*a.tensor, first, now, block_of_a.data());
    b.file->read(*b.tensor, first, now, block_of_b.data());
    for (size_t i = 0; i < now; ++i)
      if (!(std::abs(block_of_a[i] - block_of_b[i]) <= rounding * std::abs(block_of_a[i]) + rounding * 0x1p-16)) return false;
  }
  return true;
}

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

std::string state_prefix(State state, int copy = CheckpointBlock::none, int island = 0) {
  const std::string of_island = island ? concat("island_", island, ".") : "";
  if (state == State::weight) return of_island;
  return of_island + std::string(1, char(state)) + (copy == CheckpointBlock::none ? "" : std::to_string(copy)) + ".";
}

// The tensors of a folder, from one file or several, by names without "transformer.": "wte.weight", "m.wte.weight".
class TensorFiles {
 public:
  // cure: what to do about tensors that do not fit
  TensorFiles(const std::filesystem::path& folder, const std::vector<std::filesystem::path>& paths, const char* cure)
      : folder_(folder), cure_(cure) {
    for (const std::filesystem::path& path : paths) {
      const auto& file = files_.emplace_back(std::make_unique<SafetensorsFile>(path));
      for (const TensorInfo& tensor : file->tensors()) add(*file, tensor);
    }
  }

  // Some programs store the tied head as well, which is the same as wte, or in its place. A head that differs means
  // another model: that fails.
  void drop_tied_head() {
    const auto head = stored_.find("lm_head.weight"), embedding = stored_.find("wte.weight");
    if (head == stored_.end()) return;
    if (embedding == stored_.end()) stored_.emplace("wte.weight", head->second);
    else if (!same_values(head->second, embedding->second))
      fail(folder_, ": lm_head.weight differs from wte.weight, this trainer supports only a tied head: give such weights");
    stored_.erase(head);
  }

  // Loads this rank's errors. `stored` tells how many copies there are of each tensor.
  void load_errors(Parameters& parameters, size_t most) const {
    const Shards& shards = parameters.shards();
    std::map<const TensorDescriptor*, std::vector<StoredTensor>> copies;
    for (const TensorDescriptor& tensor : shards.list().tensors()) {
      const auto find = [&](size_t copy) { return stored_.find(state_prefix(State::error, int(copy)) + tensor.name); };
      std::vector<StoredTensor>& found = copies[&tensor];
      for (auto next = find(0); next != stored_.end(); next = find(found.size())) check_shape(found.emplace_back(next->second), tensor);
      if (found.empty() && !stored_.empty()) fail(folder_, ": tensor ", file_prefix(State::error, shards.list(), 0), tensor.name, " is missing", cure_);
    }
    for (const CheckpointBlock& block : read_blocks(error_slices(shards), most)) {
      const std::vector<StoredTensor>& all = copies.at(block.tensor);
      const Copies wanted = copies_of(*block.tensor, shards);
      if (all.size() == size_t(wanted.all)) load_block(all[size_t(wanted.own)], block, State::error, parameters);
      else load_equal_part(all, block, wanted.all, parameters);
    }
  }

  // Loads this rank's factors, if there are as many copies as on this mesh.
  void load_factors(Parameters& parameters) const {
    for (const TensorDescriptor& factor : parameters.factors()) {
      const Copies wanted = copies_of_factor(factor, parameters.shards().list());
      const auto name = [&](int copy) { return state_prefix(State::factor, copy) + factor.name; };
      if (factor.local == 0 || !stored_.contains(name(wanted.all - 1)) || stored_.contains(name(wanted.all))) continue;
      const StoredTensor& own = stored_.at(name(wanted.own));
      check_shape(own, factor);
      load_block(own, {&factor, 0, factor.local}, State::factor, parameters);
    }
  }

  // Loads the elements of these states that this rank keeps. Before it reads the first block, it fails if a tensor is missing,
  // unknown or of another shape.
  void load(Parameters& parameters, const std::vector<State>& states, size_t most, int island = 0) const {
    std::map<std::string, StoredTensor> unknown = stored_;
    for (State state : states)
      for (const TensorDescriptor& tensor : parameters.shards().list().tensors()) {
        const auto found = unknown.find(state_prefix(state, CheckpointBlock::none, island) + tensor.name);
        if (found == unknown.end())
          fail(folder_, ": tensor ", file_prefix(state, parameters.shards().list(), CheckpointBlock::none, island), tensor.name, " ",
               shape_text(tensor.shape), " is missing", cure_);
        check_shape(found->second, tensor);
        unknown.erase(found);
      }
    if (!unknown.empty()) fail(folder_, ": tensor ", excerpt(unknown.begin()->first), " is not of this model", cure_);
    for (State state : states)
      for (const CheckpointBlock& block : read_blocks(parameters.kept_slices(), most))
        load_block(stored_.at(state_prefix(state, CheckpointBlock::none, island) + block.tensor->name), block, state, parameters);
  }

 private:
  void add(const SafetensorsFile& file, const TensorInfo& tensor) {
    std::string name = tensor.name;
    for (const std::string_view prefix : {"base_model.model.", "transformer."})
      if (const size_t at = name.find(prefix); at != name.npos) name.erase(at, prefix.size());
    // Old versions of transformers stored the constant causal mask of every layer, which is not needed.
    if (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")) return;
    if (!stored_.emplace(name, StoredTensor{&file, &tensor}).second)
      fail(file.path(), ": tensor ", excerpt(name), " is stored twice: remove one");
  }

  std::filesystem::path folder_;
  const char* cure_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, StoredTensor> stored_;
};

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
void load_errors(const std::filesystem::path& folder, Parameters& parameters, size_t most) {
  const TensorFiles files(folder, find_tensor_files(folder, "errors"), ": resume from another checkpoint");
  files.load_errors(parameters, most);
  files.load_factors(parameters);
}

nlohmann::json load_trainer(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "trainer.json";
  nlohmann::json trainer = read_json_object(path);
  JsonFields(path, trainer, ": resume from another checkpoint").size("step");
  return trainer;
}
