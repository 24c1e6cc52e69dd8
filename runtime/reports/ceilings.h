// The highest rates of this device, and the rates of some kernels, as dev/ceilings.cu measured them: `--profile`
// compares kernels with them, and the planner's forecast uses them.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

struct Ceilings {
  double copy = 0, product = 0;  // bytes read and written per second; FLOP/s of matrix products in the run's dtype

  // Rates for forecasts (runtime/planner/forecast.md), also in the run's dtype.
  double update = 0, launch = 0;  // AdamW's bytes per second; seconds from a small kernel to the next
  double attention_forward = 0, attention_backward = 0, gelu = 0;  // FLOP/s
  double norm_row = 0, loss_row = 0;  // seconds of a short row of LayerNorm, and of 2,048 bytes of logits, beside their bytes
  std::string device;
  bool integrated = false;  // ranks of a host share the device, and its memory is the host's
  int processors = 0;       // that each compute whole tiles of a product; 0: not known

  // The shortest time in which a kernel can move these bytes and do these FLOPs.
  double milliseconds(double bytes, double flops) const { return 1e3 * std::max(bytes / copy, flops / product); }
};

// path: a file with the JSON that dev/ceilings.cu prints; device: the name of this run's device, which must be the
// same.
Ceilings load_ceilings(const std::filesystem::path& path, const std::string& dtype, const std::string& device);
