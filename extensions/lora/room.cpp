#include <algorithm>

#include "extensions/lora/adapter_config.h"
#include "extensions/lora/options.h"
#include "gpt/room_options.h"

namespace {

struct Targets {
  std::string names = "qkv,projection,up,down";
};

}  // namespace

Room lora_room = {
    .name = "lora",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--lora-rank", o.lora.rank, in_range(0, 4096),
          "train adapters of this rank (LoRA) beside the weights of --init, which stay as they are; 0: train all weights");
      add(app, "--lora-alpha", o.lora.alpha, in_range(1e-3, 1e6), "adapters count alpha / rank times (default: twice the rank)")
          ->default_str("");
      add(app, "--lora-targets", o.of<Targets>().names, list_of(one_of({"qkv", "projection", "up", "down"})),
          "linear layers that have an adapter, with commas between them")->type_name("NAMES");
      app.add_option("--merge", o.of<MergeOptions>().folder, "write a checkpoint's adapters and the model beside which they were "
                     "trained as one Hugging Face folder, and stop")->type_name("DIR")
          ->each([&o](const std::string&) { o.generate = true, o.dtype = "fp32"; });
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(!o.of<MergeOptions>().folder.empty(), {"--dtype", "--train"}, "beside --merge, which writes a model in fp32 and trains nothing: leave it out");
      refuse(!o.lora.is_on(), {"--lora-alpha", "--lora-targets"}, "is for --lora-rank: add that, or leave it out");
      refuse(o.lora.is_on(), {"--fp8", "--check-mesh", "--calibrate"}, "beside --lora-rank is not there yet: leave one of them out");
    },
    .complete = [](Options& o) {
      if (o.lora.is_on() && o.lora.alpha == 0) o.lora.alpha = 2 * o.lora.rank;
      const std::vector<std::string> targets = words_of(o.of<Targets>().names);
      for (const auto& [name, module] : lora_targets)
        if (std::ranges::count(targets, name) > 0) o.lora.modules.push_back(module);
    },
    .refuse_on_ranks = [](const Options& o) {
      const std::string& folder = o.of<MergeOptions>().folder;
      if (o.mesh.ranks() > 1 && !folder.empty()) usage_error("--merge ", excerpt(folder), " is for one rank: start it alone");
    },
    .trained_tensors = [](const StepOptions& o) {
      return o.lora.is_on() ? adapter_tensors(block_tensors(size_t(o.shape.channels)), o.lora) : std::vector<TensorRow>();
    },
    .add_arithmetic = [](nlohmann::json& arithmetic, const Options& o) {
      arithmetic.update({{"lora", o.lora.text()}, {"base", o.of<AdapterBase>().checksum}});
    },
    .folder_of_model = folder_beside_adapters,
    .add_files = [](std::map<std::string, std::string>& files, const Options& o) {
      if (o.lora.is_on()) files["adapter_config.json"] = adapter_config(o.lora, o.init);
    },
};
