// A folder of weights and moments: either refused, or all wanted values arrive.
// Input: the contents of `names`, the safetensors files among them as safetensors_of takes them.
#include "test/fuzz/fuzz.h"

#include "runtime/checkpoint.h"

namespace {

const char* const names[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                             "model.safetensors.index.json", "a.safetensors", "b.safetensors",
                             "optimizer.safetensors.index.json"};
const std::vector<CheckpointTensor> tensors = {{"wte.weight", {2, 3}}, {"ln_f.bias", {3}}};

// Takes slices, and counts their values.
struct Received {
  size_t values = 0;
  CopyIn copy_in() {
    return [this](const CheckpointSlice& slice, State, const std::vector<float>& from) {
      require(from.size() == slice.count, slice.tensor.name, ": ", from.size(), " values instead of ", slice.count);
      values += from.size();
    };
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  size_t file_bytes = 0;
  std::filesystem::path folder;
  const std::vector<std::string> parts = parts_of({reinterpret_cast<const char*>(data), size}, std::size(names));
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = names[i], content = name.ends_with(".json") ? parts[i] : safetensors_of(parts[i]);
    folder = fuzzed_or_none(name, content).parent_path();
    file_bytes += content.size();
  }
  const ModelShape shape = {.layers = 1, .heads = 3, .channels = 3, .vocabulary = 2, .positions = 2};
  const std::vector<CheckpointSlice> slices = {{tensors[0], 1, 4}, {tensors[1], 0, 3}, {tensors[0], 5, 1}};
  Received weights, moments;
  if (done(file_bytes, [&] { load_weights(folder, shape, tensors, slices, weights.copy_in()); }))
    require(weights.values == 8, "only ", weights.values, " weights");
  if (done(file_bytes, [&] { load_optimizer(folder, tensors, slices, moments.copy_in()); }))
    require(moments.values == 16, "only ", moments.values, " moments");
  return 0;
}
