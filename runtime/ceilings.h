// What a device can do at best, as dev/ceilings.cu measured it on this very device: the marks that `--profile` holds
// kernels against.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

#include <nlohmann/json.hpp>

#include "runtime/error.h"
#include "runtime/files.h"

struct Ceilings {
  double copy, product;  // bytes/s read and written; FLOP/s of matrix products in the run's dtype

  // The shortest time in which a kernel can move these bytes and do these FLOPs.
  double milliseconds(double bytes, double flops) const { return 1e3 * std::max(bytes / copy, flops / product); }
};

// `path` holds the JSON that dev/ceilings.cu prints; `device` is the one of this run.
inline Ceilings load_ceilings(const std::filesystem::path& path, const std::string& dtype, const std::string& device) {
  const char* cure = ": measure it again with dev/ceilings.cu";
  const nlohmann::json file = read_json_object(path);
  const auto rate = [&](const nlohmann::json& object, const std::string& key) {
    const nlohmann::json value = object.is_object() ? object.value(key, nlohmann::json()) : nlohmann::json();
    if (!value.is_number() || !(value > 0))
      fail(path, ": its \"", key, "\" is ", excerpt(value.dump()), ", no rate", cure);
    return value.get<double>();
  };
  const nlohmann::json measured_on = file.value("device", nlohmann::json());
  if (measured_on != device)
    fail(path, ": was measured on ", excerpt(measured_on.dump()), ", and this is ", excerpt(device), cure);
  return {rate(file, "copy_bytes_per_s"), rate(file.value("flops_per_s", nlohmann::json()), dtype)};
}
