// The options and the data that decide what a run computes. A checkpoint records them, and whoever resumes it must give
// the same: otherwise the curve would change in the middle without a word.
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "runtime/data.h"
#include "runtime/options.h"

nlohmann::json arithmetic(const Options& o, const DataIdentity& train);

// stored: of the checkpoint in `folder`.
void check_same_arithmetic(const nlohmann::json& stored, const nlohmann::json& wanted, const std::string& folder);
