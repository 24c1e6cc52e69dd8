#include "runtime/reports/ceilings.h"

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/json_fields.h"

Ceilings load_ceilings(const std::filesystem::path& path, const std::string& dtype, const std::string& device) {
  const nlohmann::json json = read_json_object(path);
  JsonFields file(path, json, ": measure it again with dev/ceilings.cu");
  file.get<std::string>("device", "this device, " + excerpt(device), [&](const auto& found) { return found == device; });
  const auto rate = [](JsonFields fields, const std::string& key) {
    return fields.get<double>(key, "a rate", [](const auto& found) { return found.is_number() && found > 0; });
  };
  const auto of_dtype = [&](const char* key) { return rate(file.object(key), dtype); };
  return {rate(file, "copy_bytes_per_s"), of_dtype("flops_per_s"), rate(file, "update_bytes_per_s"), rate(file, "launch_s"),
          of_dtype("attention_forward_flops_per_s"), of_dtype("attention_backward_flops_per_s"), of_dtype("gelu_flops_per_s"),
          of_dtype("norm_row_s"), of_dtype("loss_row_s"), device, file.has("integrated") && json["integrated"] == 1,
          file.has("processors") ? file.count("processors") : 0};
}
