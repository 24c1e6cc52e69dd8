// The files of `--trace`. Events are written as they are taken, so that memory stays small however long the run is, and a
// run that is killed leaves its timeline: after each append() the file is whole, {"traceEvents":[...]} with an event a
// line, and the next one writes over its end.
//
// Rank 0 writes to FILE, rank r > 0 to FILE.rank<r>. At the end rank 0 moves into FILE what it sees beside it; files on
// disks of other hosts stay there.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "runtime/files.h"

class TraceFile {
 public:
  // Fails if the file can't be written.
  TraceFile(const std::filesystem::path& file, int rank);

  // For rank 0, before the others open theirs: removes what an earlier run may have left beside the file.
  static void remove_parts(const std::filesystem::path& file, int ranks);

  // JSON objects with commas between them, one a line. A disk that fails costs the rest of the timeline, which is said
  // once, and not the run.
  void append(const std::string& events);

  // For merge(): this rank's file, when all is in it.
  std::string summary() const;

  // On rank 0: every rank's summary.
  void merge(const std::vector<std::string>& summaries);

 private:
  bool add_part(const std::filesystem::path& part, size_t bytes);

  std::filesystem::path path_;  // of all ranks' file
  int rank_;
  File file_;
  size_t end_;  // of the events
  bool failed_ = false;
};
