// What a device can do at best, as dev/ceilings.cu measured it on this very device: the marks that `--profile` holds
// kernels against.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

struct Ceilings {
  double copy, product;  // bytes/s read and written; FLOP/s of matrix products in the run's dtype

  // The shortest time in which a kernel can move these bytes and do these FLOPs.
  double milliseconds(double bytes, double flops) const { return 1e3 * std::max(bytes / copy, flops / product); }
};

// `path` holds the JSON that dev/ceilings.cu prints; `device` is the one of this run.
Ceilings load_ceilings(const std::filesystem::path& path, const std::string& dtype, const std::string& device);
