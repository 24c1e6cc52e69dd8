// The files of `--trace`, in the Trace Event Format (JSON), which ui.perfetto.dev and chrome://tracing show: a process
// is a rank, a thread is a stream, times are microseconds. Events are written during the run, so that long runs need no
// more memory, and a run that is killed leaves its timeline. After each append() the file is complete,
// {"traceEvents":[...]} with one event per line; the next append() overwrites its end.
//
// Rank 0 writes to FILE, rank r > 0 to FILE.rank<r>. At the end rank 0 moves the content of the files that it sees into
// FILE; files on disks of other hosts stay there.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "gpt/base/files.h"
#include "kernels/device/timeline.h"

// Events for TraceFile::append(): the name of this rank's process, and its ranges. stage: of a pipeline; -1: there is
// none.
std::string process_event(int rank, int stage = -1);
std::string trace_events(const Timeline& timeline, int rank);

class TraceFile {
 public:
  // Fails if the file can't be written.
  TraceFile(const std::filesystem::path& file, int rank);

  // Removes the other ranks' files of an earlier run. To be called by rank 0, before these ranks open their files.
  static void remove_parts(const std::filesystem::path& file, int ranks);

  // events: JSON objects, one per line, with commas between them. If the disk fails, the rest of the timeline is lost,
  // with one message, but the run goes on.
  void append(const std::string& events);

  // Describes this rank's complete file, for merge().
  std::string summary() const;

  // Merges all files on rank 0. summaries: one per rank; empty texts on the other ranks.
  void merge(const std::vector<std::string>& summaries);

 private:
  bool add_part(const std::filesystem::path& part, size_t bytes);

  std::filesystem::path path_;  // FILE
  int rank_;
  File file_;
  size_t end_;  // where the events end, in bytes
  bool failed_ = false;
};
