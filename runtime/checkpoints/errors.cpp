#include "runtime/checkpoints/errors.h"

#include <map>

#include "gpt/checkpoint.h"
#include "gpt/tensor_files.h"

namespace {

// An equal part of the sum of all copies.
std::vector<float> equal_part(const std::vector<const StoredTensor*>& copies, const CheckpointBlock& block, int parts) {
  std::vector<double> sums(block.count);
  for (const StoredTensor* copy : copies) {
    const std::vector<float> values = copy->read(block);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
  }
  std::vector<float> part(block.count);
  for (size_t i = 0; i < sums.size(); ++i) part[i] = float(sums[i] / parts);
  return part;
}

}  // namespace

void load_errors(const std::filesystem::path& folder, Parameters& parameters, size_t most) {
  const TensorFiles files(folder, find_tensor_files(folder, "errors"), ": resume from another checkpoint");
  const Shards& shards = parameters.shards();
  std::map<const TensorDescriptor*, std::vector<const StoredTensor*>> copies;  // as many as there are in the files
  for (const TensorDescriptor& tensor : shards.list().tensors()) {
    std::vector<const StoredTensor*>& found = copies[&tensor];
    while (const StoredTensor* next = files.find(State::error, int(found.size()), tensor)) next->check_shape(tensor), found.push_back(next);
    if (found.empty() && !files.empty()) files.is_missing(tensor, file_prefix(State::error, shards.list(), 0));
  }
  for (const CheckpointBlock& block : read_blocks(error_slices(shards), most)) {
    const std::vector<const StoredTensor*>& all = copies.at(block.tensor);
    const Copies wanted = copies_of(*block.tensor, shards);
    const bool is_same = all.size() == size_t(wanted.all);
    parameters.copy_in(block, State::error, is_same ? all[size_t(wanted.own)]->read(block) : equal_part(all, block, wanted.all));
  }
  for (const TensorDescriptor& factor : parameters.factors()) {
    const Copies wanted = copies_of_factor(factor, shards.list());
    const auto find = [&](int copy) { return files.find(State::factor, copy, factor); };
    if (factor.local == 0 || !find(wanted.all - 1) || find(wanted.all)) continue;
    const CheckpointBlock whole = {&factor, 0, factor.local};
    const StoredTensor& own = *find(wanted.own);
    own.check_shape(factor);
    parameters.copy_in(whole, State::factor, own.read(whole));
  }
}
