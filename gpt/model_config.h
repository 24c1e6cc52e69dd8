// The shape of a GPT-2 model and its description in Hugging Face's config.json
// (https://huggingface.co/docs/transformers/model_doc/gpt2, GPT2Config); and adapters beside a model, as PEFT's
// adapter_config.json describes them (https://huggingface.co/docs/peft/developer_guides/checkpoint).
#pragma once

#include <filesystem>
#include <optional>

#include <nlohmann/json_fwd.hpp>

#include "extensions/lora/lora.h"

// The description of a model, for config.json. base: a folder whose config.json, if there is one, says what else belongs to
// the weights, such as the ids of tokens that begin, end and pad a text; and dropout, which this trainer does without.
nlohmann::ordered_json config_of(const ModelShape& shape, const std::filesystem::path& base = {});

// The shape that a folder's config.json describes; a missing key has transformers' default. Fails if config.json
// describes a model that this trainer does not have. Dropout is ignored: it belongs to the training, not to the
// weights.
ModelShape load_shape(const std::filesystem::path& folder);

// Fails if a folder that should hold a model holds adapters.
void refuse_adapters(const std::filesystem::path& folder);

// The text of adapter_config.json. base: the folder of the model beside which the adapters stand
std::string adapter_config(const LoraOptions& lora, const std::filesystem::path& base);

struct StoredAdapters {
  LoraOptions lora;
  std::filesystem::path base;  // the folder of the model when they were trained
  std::string checksum;        // of its weights then (checksum_of, manifest.h); trainer.json has it
};

// What a checkpoint says of its adapters; none if it has a whole model.
std::optional<StoredAdapters> load_adapter_config(const std::filesystem::path& checkpoint);
