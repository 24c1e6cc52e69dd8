// Adapters beside a model, as PEFT's adapter_config.json describes them
// (https://huggingface.co/docs/peft/developer_guides/checkpoint).
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "extensions/lora/lora.h"

struct Options;

// The text of adapter_config.json. base: the folder of the model beside which the adapters stand
std::string adapter_config(const LoraOptions& lora, const std::filesystem::path& base);

struct StoredAdapters {
  LoraOptions lora;
  std::filesystem::path base;  // the folder of the model when they were trained
  std::string checksum;        // of its weights then (checksum_of, manifest.h); trainer.json has it
};

// The description that a checkpoint has of its adapters; none if it has a whole model.
std::optional<StoredAdapters> load_adapter_config(const std::filesystem::path& checkpoint);

// The folder of the model beside which adapters are trained (Room::folder_of_model). A checkpoint of adapters sets
// options.lora, and options.init if that is empty.
std::filesystem::path folder_beside_adapters(Options& options, const std::filesystem::path& folder, bool is_checkpoint);
