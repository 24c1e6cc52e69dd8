// The model that --merge makes of adapters and the model beside which they were trained.
#pragma once

#include <filesystem>

#include "gpt/parameters.h"

// Writes the weights of one rank's model to a new folder, which transformers loads, with the tokenizer of the folder
// `base`, and the other keys of its config.json.
void write_model(const Parameters& parameters, const std::filesystem::path& base, const std::filesystem::path& out);
