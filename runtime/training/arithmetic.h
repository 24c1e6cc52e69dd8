// The options and the data that decide what a run computes. A checkpoint records them, and a resumed run must have the
// same: otherwise the loss curve would change in the middle without any message.
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "runtime/input/data.h"
#include "runtime/input/options.h"

nlohmann::json arithmetic(const Options& o, const DataIdentity& train);

// Fails if they differ. stored: from the checkpoint in `folder`; wanted: of this run.
void check_same_arithmetic(const nlohmann::json& stored, const nlohmann::json& wanted, const std::string& folder);
