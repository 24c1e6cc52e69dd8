#include "runtime/ceilings.h"

#include <nlohmann/json.hpp>

#include "processes/error.h"
#include "runtime/files.h"

Ceilings load_ceilings(const std::filesystem::path& path, const std::string& dtype, const std::string& device) {
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
  const auto of_dtype = [&](const std::string& key) { return rate(file.value(key, nlohmann::json()), dtype); };
  return {rate(file, "copy_bytes_per_s"), of_dtype("flops_per_s"), rate(file, "update_bytes_per_s"), rate(file, "launch_s"),
          of_dtype("attention_forward_flops_per_s"), of_dtype("attention_backward_flops_per_s"), of_dtype("gelu_flops_per_s"),
          of_dtype("norm_row_s"), of_dtype("loss_row_s"), device, file.value("integrated", nlohmann::json()) == 1};
}
