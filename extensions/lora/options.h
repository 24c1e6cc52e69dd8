// What is done with adapters after training (extensions/lora/command.cuh).
#pragma once

#include <string>

struct MergeOptions {
  std::string folder;  // for a checkpoint's adapters and their base in one; empty: none
};
