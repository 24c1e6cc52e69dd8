// How texts are drawn (extensions/generation/generation.cuh).
#pragma once

#include <cstddef>
#include <string>

#include "extensions/generation/sample.h"

struct TextOptions {
  bool generates = false;  // instead of training
  std::string prompt;
  size_t length = 256;  // tokens that a sample adds
  SampleOptions draw = {.temperature = 0.8};
};
