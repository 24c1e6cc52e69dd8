// What is checked before training.
#pragma once

struct CheckOptions {
  bool ranks = false, mesh = false;
};
