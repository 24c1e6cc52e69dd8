// A folder of weights and moments: either refused, or all wanted values arrive.
// Input: the contents of `names`, the safetensors files among them as safetensors_of takes them.
#include "test/fuzz/fuzz.h"

#include "gpt/checkpoint.h"
#include "test/fake_parameters.h"

namespace {

const char* const names[] = {"config.json", "model.safetensors", "optimizer.safetensors",
                             "model.safetensors.index.json", "a.safetensors", "b.safetensors",
                             "optimizer.safetensors.index.json"};
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
  FakeParameters parameters({.layers = 0, .heads = 3, .channels = 3, .vocabulary = 2, .positions = 2});
  parameters.kept = {parameters.slice("wte.weight", 1, 4), parameters.slice("ln_f.bias", 0, 3),
                     parameters.slice("wte.weight", 5, 1)};
  size_t values = 0;
  parameters.in = [&](const CheckpointBlock& block, State, const std::vector<float>& from) {
    require(from.size() == block.count, block.tensor->name, ": ", from.size(), " values instead of ", block.count);
    values += from.size();
  };
  if (done(file_bytes, [&] { load_weights(folder, parameters); })) require(values == 8, "only ", values, " weights");
  values = 0;
  if (done(file_bytes, [&] { load_optimizer(folder, parameters); })) require(values == 16, "only ", values, " moments");
  return 0;
}
