// The options of control.
#pragma once

struct ControlOptions {
  double collective_timeout = 600;  // as PyTorch's: longer than a stalling disk, or a first step, may take
};
