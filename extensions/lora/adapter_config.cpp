#include "extensions/lora/adapter_config.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "extensions/lora/options.h"
#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/json_fields.h"
#include "gpt/checkpoint.h"
#include "gpt/options.h"
#include "runtime/checkpoints/manifest.h"

std::string adapter_config(const LoraOptions& lora, const std::filesystem::path& base) {
  const nlohmann::ordered_json config = {
      {"peft_type", "LORA"}, {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", std::filesystem::weakly_canonical(base)},
      {"r", lora.rank}, {"lora_alpha", lora.alpha}, {"lora_dropout", 0.0}, {"target_modules", lora.modules},
      {"fan_in_fan_out", true},  // GPT-2's weights are (inputs, outputs)
      {"bias", "none"}, {"inference_mode", true}};
  return config.dump(2) + "\n";
}

std::optional<StoredAdapters> load_adapter_config(const std::filesystem::path& checkpoint) {
  const std::filesystem::path path = checkpoint / "adapter_config.json", trainer_path = checkpoint / "trainer.json";
  if (!std::filesystem::exists(path)) return {};
  const nlohmann::json config = read_json_object(path), trainer = read_json_object(trainer_path);
  JsonFields fields(path, config, ": give another checkpoint"), run(trainer_path, trainer, ": give another checkpoint");
  const LoraOptions lora = {fields.count("r"), fields.rate("lora_alpha"),
                            fields.list<std::string>("target_modules", "layers of a block, as \"attn.c_attn\"", [](const auto& found) {
                              return std::ranges::any_of(lora_targets, [&](const auto& target) { return found == target.second; });
                            })};
  return StoredAdapters{lora, fields.text("base_model_name_or_path"), run.object("arithmetic").text("base")};
}

std::filesystem::path folder_beside_adapters(Options& o, const std::filesystem::path& folder, bool is_checkpoint) {
  const auto refuse_adapters = [](const std::filesystem::path& model) {
    if (std::filesystem::exists(model / "adapter_config.json"))
      fail(model, ": holds adapters, not a model: name it with --resume, or make a model of it with --merge");
  };
  const std::optional<StoredAdapters> stored = is_checkpoint ? load_adapter_config(folder) : std::nullopt;
  const LoraOptions lora = stored ? stored->lora : is_checkpoint ? LoraOptions() : o.lora;
  if (o.lora.is_on() && is_checkpoint && !stored)
    usage_error("--lora-rank: ", folder.string(), " holds a whole model, and no adapters: give it to --init, and another --out");
  if (o.lora.is_on() && o.lora != lora)
    usage_error("--lora-rank: the adapters in ", folder.string(), " are others (", lora.text(), "): leave --lora options out");
  if (!stored && !folder.empty()) refuse_adapters(folder);
  if (!lora.is_on()) return folder;
  o.lora = lora;
  refuse(batch_problem(o));
  if (stored && o.init.empty()) o.init = stored->base;
  if (o.init.empty()) usage_error("--lora-rank trains adapters of a model that is there: name its folder with --init");
  if (stored && !std::filesystem::exists(o.init))
    fail(folder, ": the model beside which its adapters were trained is not in ", o.init, ": name its folder with --init");
  refuse_adapters(o.init);
  std::string& checksum = o.of<AdapterBase>().checksum;
  checksum = checksum_of(find_weight_files(o.init));
  if (stored && stored->checksum != checksum)
    fail(o.init, ": holds other weights than those beside which the adapters in ", folder, " were trained (checksum ",
         checksum, ", not ", stored->checksum, "): name the right folder with --init");
  return o.init;
}
