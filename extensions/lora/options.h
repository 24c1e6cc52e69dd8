// The room's values that are no options of a model (extensions/lora/lora.h has those).
#pragma once

#include <string>

struct MergeOptions {
  std::string folder;  // for a checkpoint's adapters and their base in one; empty: none
};

struct AdapterBase {
  std::string checksum = "off";  // of the weights beside which adapters are trained
};
