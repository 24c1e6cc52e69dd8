// The shape of a GPT-2 model and its description in Hugging Face's config.json
// (https://huggingface.co/docs/transformers/model_doc/gpt2, GPT2Config).
#pragma once

#include <filesystem>

#include <nlohmann/json_fwd.hpp>

#include "parallel/shapes.h"

nlohmann::ordered_json config_of(const ModelShape& shape);

// The shape that a folder's config.json describes; a missing key has transformers' default. Fails if config.json
// describes a model that this trainer does not have. Dropout is ignored: it belongs to the training, not to the
// weights.
ModelShape load_shape(const std::filesystem::path& folder);
