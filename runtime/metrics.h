// OUT/metrics.jsonl: a JSON object a line, for plots and tests. Keys keep their order, floating-point numbers
// have 9 significant digits (a float survives the round trip), and what is not finite is null, as JSON has no
// NaN. Only whole lines: each is written at once in append mode; what does not fit on the disk is taken back.
//
// Training does not end for the sake of a log: lines that the disk does not take wait in memory and are written with a
// later one, and a file that was deleted or moved during the run is made anew.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "runtime/files.h"

std::string metrics_line(const nlohmann::ordered_json& fields);

class MetricsLog {
 public:
  // A fresh log is empty; a resumed one keeps the lines up to the checkpoint's step. The first line creates the file, or
  // cuts it: a run that fails before leaves everything as it was.
  MetricsLog(std::filesystem::path path, std::optional<size_t> resumed_step);

  void append(const nlohmann::ordered_json& fields);

  // Removes the lines of later steps.
  void go_back(size_t step);

  // Writes the lines that wait. Fails if the disk does not take them now either: they will be lost.
  void finish();

 private:
  void flush();
  void find_file();

  std::filesystem::path path_;
  std::optional<size_t> resumed_step_;
  std::unique_ptr<File> file_;
  std::string waiting_;        // lines that are not in the file yet
  bool is_in_trouble_ = false;  // and this has been said
};
