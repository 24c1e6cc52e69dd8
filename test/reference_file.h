// What others have computed: the files of test/reference/, which dev/reference.py and its like write.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "gpt/safetensors.h"

inline std::vector<float> tensor_of(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo* info = file.find(name);
  REQUIRE_MESSAGE(info, name);
  std::vector<float> values(element_count(info->shape));
  file.read(*info, 0, values.size(), values.data());
  return values;
}

// Inputs and targets of a step, each (B,T), of the tensor "tokens" (steps,B,T + 1).
inline std::pair<std::vector<int>, std::vector<int>> tokens_of(const SafetensorsFile& file, int step, int B, int T) {
  const std::vector<float> all = tensor_of(file, "tokens");
  std::vector<int> inputs, targets;
  for (int b = 0; b < B; ++b)
    for (int t = 0; t < T; ++t) {
      const size_t i = (size_t(step) * B + b) * (T + 1) + t;
      inputs.push_back(int(all[i]));
      targets.push_back(int(all[i + 1]));
    }
  return {inputs, targets};
}
