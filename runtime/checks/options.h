// Options of the checks before training.
#pragma once

struct CheckOptions {
  bool ranks = false, mesh = false;
};
