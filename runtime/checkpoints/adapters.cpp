#include "runtime/checkpoints/adapters.h"

#include <vector>

#include <nlohmann/json.hpp>

#include "parallel/processes/error.h"
#include "parallel/processes/text.h"
#include "runtime/checkpoints/checkpoint.h"
#include "runtime/checkpoints/manifest.h"
#include "runtime/checkpoints/model_config.h"
#include "runtime/input/files.h"
#include "runtime/input/json_fields.h"

namespace {

// weight (inputs,outputs) += s·(b·a)ᵀ, a (rank,inputs), b (outputs,rank)
void add_adapter(std::vector<float>& weight, const std::vector<float>& a, const std::vector<float>& b, const LoraOptions& lora) {
  const size_t rank = size_t(lora.rank), inputs = a.size() / rank, outputs = b.size() / rank;
  std::vector<double> of_input(rank);
  for (size_t i = 0; i < inputs; ++i) {
    for (size_t k = 0; k < rank; ++k) of_input[k] = lora.alpha / lora.rank * a[k * inputs + i];
    for (size_t o = 0; o < outputs; ++o) {
      double sum = weight[i * outputs + o];
      for (size_t k = 0; k < rank; ++k) sum += of_input[k] * b[o * rank + k];
      weight[i * outputs + o] = float(sum);
    }
  }
}

}  // namespace

std::string adapter_config(const LoraOptions& lora, const std::filesystem::path& base) {
  const nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                         {"task_type", "CAUSAL_LM"},
                                         {"base_model_name_or_path", std::filesystem::absolute(base).lexically_normal()},
                                         {"r", lora.rank},
                                         {"lora_alpha", lora.alpha},
                                         {"lora_dropout", 0.0},
                                         {"target_modules", lora.modules},
                                         {"fan_in_fan_out", true},  // GPT-2's weights are (inputs, outputs)
                                         {"bias", "none"},
                                         {"inference_mode", true}};
  return config.dump(2) + "\n";
}

std::optional<StoredAdapters> load_adapter_config(const std::filesystem::path& checkpoint) {
  const std::filesystem::path path = checkpoint / "adapter_config.json";
  if (!std::filesystem::exists(path)) return {};
  const nlohmann::json config = read_json_object(path), trainer = load_trainer(checkpoint);
  const char* cure = ": give another checkpoint";
  JsonFields fields(path, config, cure), run(checkpoint / "trainer.json", trainer, cure);
  const auto is_text = [](const auto& found) { return found.is_string(); };
  const auto is_number = [](const auto& found) { return found.is_number(); };
  const LoraOptions lora = {fields.count("r", ModelShape::most_channels), fields.get<double>("lora_alpha", "a number", is_number),
                            fields.list<std::string>("target_modules", "texts", is_text)};
  return StoredAdapters{lora, fields.text("base_model_name_or_path"), run.object("arithmetic").text("base")};
}

std::string weights_checksum(const std::filesystem::path& folder) {
  std::string all;
  for (const std::filesystem::path& path : find_weight_files(folder)) {
    const File file(path, for_reading);
    all += xxh3_of(file, 0, file.size());
  }
  return xxh3(all);
}

void merge_adapters(const std::filesystem::path& base, const std::filesystem::path& checkpoint, const LoraOptions& lora,
                    const std::filesystem::path& out) {
  const TensorList list(load_shape(base)), adapters = adapters_of(list, lora);
  if (std::filesystem::exists(out)) fail("--merge ", out, ": exists already: name a new folder, or remove it");
  auto weights = read_weights(base, list);
  const auto pairs = read_weights(checkpoint, adapters);
  std::vector<NamedShape> shapes;
  for (const TensorDescriptor& tensor : list.tensors()) {
    const std::string module = module_of(tensor.name);
    if (const auto a = pairs.find(module + ".lora_A.weight"); a != pairs.end() && tensor.shape.size() == 2)
      add_adapter(weights[tensor.name], a->second, pairs.at(module + ".lora_B.weight"), lora);
    shapes.push_back({file_prefix(State::weight, list) + tensor.name, tensor.shape});
  }
  const std::filesystem::path partial = out.string() + ".partial";  // so that half a model does not look complete
  std::filesystem::remove_all(partial);
  std::filesystem::create_directories(partial);
  SafetensorsWriter writer(partial / "model.safetensors", shapes, {{"format", "pt"}});
  for (const TensorDescriptor& tensor : list.tensors())
    writer.write(file_prefix(State::weight, list) + tensor.name, 0, tensor.count(), weights[tensor.name].data());
  writer.close();
  write_file(partial / "config.json", config_of(list.shape()).dump(2) + "\n");
  for (const auto& [name, text] : tokenizer_files(base)) write_file(partial / name, text);
  std::filesystem::rename(partial, out);
}
