#include "extensions/lora/merged_model.h"

#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/checkpoint.h"
#include "gpt/safetensors.h"

void write_model(const Parameters& parameters, const std::filesystem::path& base, const std::filesystem::path& folder) {
  const TensorList& list = parameters.shards().list();
  const std::filesystem::path out = folder.has_filename() ? folder : folder.parent_path();  // "model/" is "model"
  if (std::filesystem::exists(out)) fail(out, ": exists already: name a new folder for the model, or remove it");
  const std::filesystem::path partial = out.string() + ".partial";  // so that half a model does not look complete
  std::filesystem::remove_all(partial);  // of an attempt that was killed
  // At the end it is removed, unless it has its final name.
  const std::shared_ptr<void> at_end(nullptr, [&](void*) { attempt([&] { std::filesystem::remove_all(partial); }); });
  std::filesystem::create_directories(partial);
  std::vector<NamedShape> shapes;
  for (const TensorDescriptor& tensor : list.tensors()) shapes.push_back({file_prefix(State::weight, list) + tensor.name, tensor.shape});
  SafetensorsWriter writer(partial / "model.safetensors", shapes, {{"format", "pt"}});
  for (const Slice& slice : parameters.kept_slices()) {
    std::vector<float> values(slice.count);
    parameters.copy_out(slice, State::weight, values.data());
    parameters.wait_for_copies();
    writer.write(file_prefix(State::weight, list) + slice.tensor->name, slice.first, slice.count, values.data());
  }
  writer.close();
  write_file(partial / "config.json", config_of(list.shape(), base).dump(2) + "\n");
  for (const char* name : tokenizer_files)
    if (std::filesystem::exists(base / name)) std::filesystem::copy(base / name, partial / name);
  std::filesystem::rename(partial, out);
}
