// The options of control.
#pragma once

struct ControlOptions {
  double collective_timeout = 600;  // as PyTorch's: above what a disk that stalls, or a first step, may take
};
