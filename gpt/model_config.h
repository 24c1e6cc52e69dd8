// The shape of a GPT-2 model and its description in Hugging Face's config.json
// (https://huggingface.co/docs/transformers/model_doc/gpt2, GPT2Config).
#pragma once

#include <filesystem>

#include <nlohmann/json_fwd.hpp>

#include "gpt/shapes.h"

// The description of a model, for config.json. base: a folder whose config.json, if there is one, adds the other keys that
// belong to the weights, such as the ids of tokens that begin, end and pad a text; and dropout, which this trainer does without.
nlohmann::ordered_json config_of(const ModelShape& shape, const std::filesystem::path& base = {});

// The shape that a folder's config.json describes; a missing key has transformers' default. Fails if config.json
// describes a model that this trainer does not have. Dropout is ignored: it belongs to the training, not to the
// weights.
ModelShape load_shape(const std::filesystem::path& folder);
