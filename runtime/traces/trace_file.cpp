#include "runtime/traces/trace_file.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <system_error>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include "gpt/base/error.h"
#include "gpt/base/text.h"

namespace {

using Json = nlohmann::ordered_json;

const std::string header = "{\"traceEvents\":[\n", footer = "\n]}\n";

std::filesystem::path part_path(const std::filesystem::path& file, int rank) {
  return rank == 0 ? file : std::filesystem::path(file.string() + ".rank" + std::to_string(rank));
}

std::string name_event(const char* what, int rank, size_t thread, const std::string& name) {
  return Json{{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", {{"name", name}}}}.dump();
}

// x > 0, to six digits.
double rounded(double x) {
  const double unit = std::pow(10, std::floor(std::log10(x)) - 5);
  return std::round(x / unit) * unit;
}

std::string range_event(const TracedRange& range, int rank) {
  const double nanoseconds = double(std::max<int64_t>(range.duration, 1));
  Json known = {{"bytes", range.bytes}, {"GB/s", range.bytes > 0 ? rounded(range.bytes / nanoseconds) : 0}};
  if (range.flops > 0) known["GFLOP"] = rounded(range.flops / 1e9);
  if (range.flops > 0) known["GFLOP/s"] = rounded(range.flops / nanoseconds);
  if (range.context.step >= 0) known["step"] = range.context.step;
  if (range.context.micro_batch >= 0) {
    known["micro-batch"] = range.context.micro_batch;
    known["chunk"] = range.context.chunk;
    if (range.context.work) known["work"] = range.context.work;
  }
  if (range.context.layer >= 0) known["layer"] = range.context.layer;
  return Json{{"ph", "X"}, {"name", range.name}, {"pid", rank}, {"tid", range.stream},
              {"ts", double(range.start) / 1e3}, {"dur", double(range.duration) / 1e3}, {"args", known}}.dump();
}

}  // namespace

std::string process_event(int rank, int stage) {
  const std::string of_stage = stage < 0 ? "" : ", stage " + std::to_string(stage);
  return name_event("process_name", rank, 0, "rank " + std::to_string(rank) + of_stage + " (" + host_name() + ")");
}

std::string trace_events(const Timeline& timeline, int rank) {
  std::vector<std::string> events;
  for (const auto& [number, name] : timeline.streams) events.push_back(name_event("thread_name", rank, number, name));
  for (const TracedRange& range : timeline.ranges) events.push_back(range_event(range, rank));
  return joined(events, {}, ",\n");
}

TraceFile::TraceFile(const std::filesystem::path& file, int rank) try
    : path_(file), rank_(rank), file_(part_path(file, rank), O_WRONLY | O_CREAT | O_TRUNC), end_(header.size()) {
  const std::string empty = header + footer;
  file_.write(0, empty.data(), empty.size());
} catch (const std::exception& problem) {
  fail("--trace ", problem.what(), ": check the folder and its space");
}

void TraceFile::remove_parts(const std::filesystem::path& file, int ranks) {
  std::error_code ignored;  // if it can't be removed, the rank that opens it will report the error
  for (int rank = 1; rank < ranks; ++rank) std::filesystem::remove(part_path(file, rank), ignored);
}

void TraceFile::append(const std::string& events) {
  if (events.empty() || failed_) return;
  const std::string separator = end_ > header.size() ? ",\n" : "", text = separator + events + footer;
  try {
    file_.write(end_, text.data(), text.size());
    end_ += text.size() - footer.size();
  } catch (const std::exception& problem) {
    failed_ = true;
    // Restores the old end of the file, which needs no new space on the disk.
    const bool whole = ftruncate(file_.descriptor(), off_t(end_ + footer.size())) == 0 &&
                       pwrite(file_.descriptor(), footer.data(), footer.size(), off_t(end_)) == ssize_t(footer.size());
    print_error(one_line(std::string("--trace ") + problem.what() + ": the timeline is incomplete" +
                         (whole ? "" : " and its end broken") + ", the run goes on"));
  }
}

std::string TraceFile::summary() const {
  if (rank_ > 0) fsync(file_.descriptor());  // otherwise rank 0 may not see all of it on a network file system
  return std::to_string(end_ + footer.size()) + " " + host_name();
}

void TraceFile::merge(const std::vector<std::string>& summaries) {
  if (rank_ > 0) return;
  std::string beside;
  for (int rank = 1; rank < int(summaries.size()); ++rank) {
    const std::filesystem::path part = part_path(path_, rank);
    const std::string& summary = summaries[size_t(rank)];
    if (!add_part(part, std::stoull(summary)))
      beside += (beside.empty() ? "" : ", ") + part.string() + " on" + summary.substr(summary.find(' '));
  }
  if (!beside.empty()) std::printf("trace     not in %s: %s\n", path_.c_str(), beside.c_str());
}

// Appends the events of another rank's file to this one, and removes that file if all went well. A file of another size
// is not the one that the rank wrote, and is left alone. Returns true if the file was added.
bool TraceFile::add_part(const std::filesystem::path& part, size_t bytes) {
  std::error_code error;
  if (std::filesystem::file_size(part, error) != bytes || error) return false;
  std::ifstream lines(part);
  std::string events, line;
  std::getline(lines, line);  // skip the header
  const auto append_events = [&] {
    append(events.substr(0, events.find_last_not_of(",\n") + 1));
    events.clear();
  };
  while (std::getline(lines, line) && line != "]}") {
    events += line + "\n";
    if (events.size() > size_t(1) << 20) append_events();
  }
  append_events();
  if (failed_ || lines.eof()) return false;
  std::filesystem::remove(part, error);
  return true;
}
