// OUT/metrics.jsonl: a JSON object a line, for plots and tests. Keys keep their order, floating-point numbers
// have 9 significant digits (a float survives the round trip), and what is not finite is null, as JSON has no
// NaN. Only whole lines: each is one write in append mode; one that does not fit on the disk is taken back.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "runtime/files.h"

std::string metrics_line(const nlohmann::ordered_json& fields);

class MetricsLog {
 public:
  // A fresh log is empty; a resumed one keeps the lines up to the checkpoint's step.
  MetricsLog(const std::filesystem::path& path, std::optional<size_t> resumed_step);

  void append(const nlohmann::ordered_json& fields);

 private:
  void cut(size_t bytes);

  File file_;
};
