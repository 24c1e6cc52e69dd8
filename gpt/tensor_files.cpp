#include "gpt/tensor_files.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "gpt/base/error.h"
#include "gpt/base/text.h"
#include "gpt/checkpoint.h"

std::string state_prefix(State state, int copy, int island) {
  const std::string of_island = island ? concat("island_", island, ".") : "";
  if (state == State::weight) return of_island;
  return of_island + std::string(1, char(state)) + (copy == CheckpointBlock::none ? "" : std::to_string(copy)) + ".";
}

void StoredTensor::check_shape(const TensorDescriptor& wanted) const {
  if (tensor->shape == wanted.shape) return;
  fail(file->path(), ": tensor ", wanted.name, " has shape ", shape_text(tensor->shape), ", the model needs ", shape_text(wanted.shape),
       ": check config.json");
}

// One value that is not finite makes every loss NaN: the run would leave out all updates, and save the same weights
// again. (An update leaves gradients out that are not.)
std::vector<float> StoredTensor::read(const CheckpointBlock& block, bool may_be_infinite) const {
  std::vector<float> values(block.count);
  file->read(*tensor, block.first, block.count, values.data());
  const auto bad = std::ranges::find_if(values, [&](float value) { return !may_be_infinite && !std::isfinite(value); });
  if (bad == values.end()) return values;
  fail(file->path(), ": element ", block.first + size_t(bad - values.begin()), " of tensor ", excerpt(tensor->name), " is ", *bad,
       ": take other weights, or a checkpoint from before they broke");
}

// Does b hold the values of a? A tensor of 16 bits may be the other one, rounded.
static bool same_values(const StoredTensor& a, const StoredTensor& b) {
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

TensorFiles::TensorFiles(const std::filesystem::path& folder, const std::vector<std::filesystem::path>& paths, const char* cure)
    : folder_(folder), cure_(cure) {
  for (const std::filesystem::path& path : paths) {
    const auto& file = files_.emplace_back(std::make_unique<SafetensorsFile>(path));
    for (const TensorInfo& tensor : file->tensors()) add(*file, tensor);
  }
}

void TensorFiles::add(const SafetensorsFile& file, const TensorInfo& tensor) {
  std::string name = tensor.name;
  for (const std::string_view prefix : {"base_model.model.", "transformer."})
    if (const size_t at = name.find(prefix); at != name.npos) name.erase(at, prefix.size());
  // Old versions of transformers stored the constant causal mask of every layer, which is not needed.
  if (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")) return;
  if (!stored_.emplace(name, StoredTensor{&file, &tensor}).second)
    fail(file.path(), ": tensor ", excerpt(name), " is stored twice: remove one");
}

void TensorFiles::drop_tied_head() {
  const auto head = stored_.find("lm_head.weight"), embedding = stored_.find("wte.weight");
  if (head == stored_.end()) return;
  if (embedding == stored_.end()) stored_.emplace("wte.weight", head->second);
  else if (!same_values(head->second, embedding->second))
    fail(folder_, ": lm_head.weight differs from wte.weight, this trainer supports only a tied head: give such weights");
  stored_.erase(head);
}

void TensorFiles::load(Parameters& parameters, const std::vector<State>& states, size_t most, int island) const {
  std::map<std::string, StoredTensor> unknown = stored_;
  const TensorList& list = parameters.shards().list();
  const auto name_of = [&](State state, const TensorDescriptor& tensor) { return state_prefix(state, CheckpointBlock::none, island) + tensor.name; };
  for (State state : states)
    for (const TensorDescriptor& tensor : list.tensors()) {
      const auto found = unknown.find(name_of(state, tensor));
      if (found == unknown.end()) is_missing(tensor, file_prefix(state, list, CheckpointBlock::none, island));
      found->second.check_shape(tensor);
      unknown.erase(found);
    }
  if (!unknown.empty()) fail(folder_, ": tensor ", excerpt(unknown.begin()->first), " is not of this model", cure_);
  for (State state : states)
    for (const CheckpointBlock& block : read_blocks(parameters.kept_slices(), most))
      parameters.copy_in(block, state, stored_.at(name_of(state, *block.tensor)).read(block, state == State::gradient));
}

const StoredTensor* TensorFiles::find(State state, int copy, const TensorDescriptor& tensor) const {
  const auto found = stored_.find(state_prefix(state, copy) + tensor.name);
  return found == stored_.end() ? nullptr : &found->second;
}

void TensorFiles::is_missing(const TensorDescriptor& tensor, const std::string& prefix) const {
  fail(folder_, ": tensor ", prefix, tensor.name, " ", shape_text(tensor.shape), " is missing", cure_);
}
