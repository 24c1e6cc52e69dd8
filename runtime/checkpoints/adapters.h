// Checkpoints of adapters (--lora-rank; parallel/lora.h), as PEFT saves and loads them
// (https://huggingface.co/docs/peft/developer_guides/checkpoint): in the place of a model's files they have
//
//   adapter_model.safetensors   fp32 A and B, "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", ...
//   adapter_config.json         rank, alpha, which layers have adapters, and the folder of the base model
//   trainer.json                besides what it has for any run (runtime/checkpoints/checkpoint.h): a checksum of the
//                               base model's weights, without which the adapters mean nothing
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "parallel/lora.h"

struct StoredAdapters {
  LoraOptions lora;
  std::filesystem::path base;  // the folder of the base model when they were trained
  std::string checksum;        // weights_checksum(base) then
};

// The text of adapter_config.json. base: the folder of the base model
std::string adapter_config(const LoraOptions& lora, const std::filesystem::path& base);

// What a checkpoint says of its adapters; none if it has a whole model.
std::optional<StoredAdapters> load_adapter_config(const std::filesystem::path& checkpoint);

// XXH3 of all bytes of a folder's weights. Reads them, at the speed of the disk.
std::string weights_checksum(const std::filesystem::path& folder);

// Writes base model + adapters to `out`, a new folder, as a whole model in Hugging Face's format: W + s·(B·A)ᵀ in the
// place of each W that has an adapter, added in double and rounded to float. Holds the model in the host's memory.
void merge_adapters(const std::filesystem::path& base, const std::filesystem::path& checkpoint, const LoraOptions& lora,
                    const std::filesystem::path& out);
