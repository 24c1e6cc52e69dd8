// OUT/metrics.jsonl: one JSON object per line, for plots and tests. Keys keep their order. Floating-point numbers have
// 9 significant digits, enough to restore every float exactly. A number that is not finite is null, because JSON has no
// NaN. The file holds only whole lines: each is written at once in append mode, and a line that does not fit on the
// disk is removed again.
//
// An error of the log does not end the training. Lines that the disk does not take wait in memory and are written with
// a later one, and a file that was deleted or moved during the run is created again.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include <nlohmann/json_fwd.hpp>

#include "gpt/base/files.h"

std::string metrics_line(const nlohmann::ordered_json& fields);

class MetricsLog {
 public:
  // A new log is empty; a resumed one keeps the lines up to the checkpoint's step (0: a new one). The first line
  // creates the file, or removes the later lines. So a run that fails before its first line changes nothing.
  MetricsLog(std::filesystem::path path, size_t resumed_step) : path_(std::move(path)), resumed_step_(resumed_step) {}

  void append(const nlohmann::ordered_json& fields) { append(metrics_line(fields)); }
  void append(const std::string& line);  // `line` includes the newline

  // Removes the lines of later steps.
  void go_back(size_t step);

  // Writes the lines that wait. Fails if the disk does not take them even now; then they are lost.
  void finish();

 private:
  void flush();
  void find_file();

  std::filesystem::path path_;
  size_t resumed_step_;
  std::unique_ptr<File> file_;
  std::string waiting_;        // lines that are not in the file yet
  bool is_in_trouble_ = false;  // the disk does not take lines; a message has said so
};
