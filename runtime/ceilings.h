// The highest rates of this device, as dev/ceilings.cu measured them: `--profile` compares kernels with them.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

struct Ceilings {
  double copy, product;  // bytes read and written per second; FLOP/s of matrix products in the run's dtype

  // The shortest time in which a kernel can move these bytes and do these FLOPs.
  double milliseconds(double bytes, double flops) const { return 1e3 * std::max(bytes / copy, flops / product); }
};

// path: a file with the JSON that dev/ceilings.cu prints; device: the name of this run's device, which must be the
// same.
Ceilings load_ceilings(const std::filesystem::path& path, const std::string& dtype, const std::string& device);
