#include "runtime/reports/metrics.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <exception>
#include <fstream>
#include <istream>
#include <sstream>
#include <utility>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"

namespace {

std::string metrics_text(const nlohmann::ordered_json& value) {
  if (value.is_number_float()) {
    if (!std::isfinite(value.get<double>())) return "null";
    char digits[32];  // to_chars does not depend on the locale, as printf does
    const auto end = std::to_chars(digits, digits + sizeof digits, value.get<double>(), std::chars_format::general, 9);
    return {digits, end.ptr};
  }
  if (!value.is_structured()) return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  std::string text;
  for (const auto& [key, element] : value.items())
    text += (text.empty() ? "" : ", ") + (value.is_object() ? nlohmann::json(key).dump() + ": " : "") + metrics_text(element);
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

// The number of bytes of the first lines that are whole and belong to steps up to `step`. After a crash, anything may
// follow them.
size_t bytes_until(std::istream& lines, size_t step) {
  size_t bytes = 0;
  for (std::string line; std::getline(lines, line) && !lines.eof(); bytes += line.size() + 1) {
    nlohmann::json fields = nlohmann::json::parse(line, nullptr, false);
    if (!fields.is_object() || !fields.contains("step") || !fields["step"].is_number_unsigned()) break;
    if (fields["step"] > step) break;
  }
  return bytes;
}

void cut(const File& file, size_t bytes) {
  if (ftruncate(file.descriptor(), off_t(bytes)) == 0) return;
  fail(file.path(), ": cannot truncate: ", std::strerror(errno));
}

}  // namespace

std::string metrics_line(const nlohmann::ordered_json& fields) { return metrics_text(fields) + "\n"; }

void MetricsLog::append(const std::string& line) {
  waiting_ += line;
  try {
    flush();
    if (is_in_trouble_) print_error(one_line(path_.string()) + ": can be written again, no line is lost");
    is_in_trouble_ = false;
  } catch (const std::exception& error) {
    if (!is_in_trouble_) print_error(one_line(error.what()) + ": lines wait in memory, training goes on");
    is_in_trouble_ = true;
  }
}

void MetricsLog::go_back(size_t step) {
  std::istringstream lines(waiting_);
  waiting_.resize(bytes_until(lines, step));
  if (!file_) return;
  std::istringstream written(file_->content());
  cut(*file_, bytes_until(written, step));
}

void MetricsLog::finish() {
  if (waiting_.empty()) return;
  try {
    flush();
  } catch (const std::exception& error) {
    fail(error.what(), ": its last ", std::count(waiting_.begin(), waiting_.end(), '\n'),
         " lines are lost, the checkpoint is not: free space; --resume from an earlier step_ folder writes them again");
  }
}

void MetricsLog::flush() {
  find_file();
  const size_t before = file_->size();
  const ssize_t written = ::write(file_->descriptor(), waiting_.data(), waiting_.size());
  if (written != ssize_t(waiting_.size())) {
    const std::string reason = written < 0 ? std::strerror(errno) : "no space for a whole line";
    cut(*file_, before);
    fail(path_, ": cannot write: ", reason);
  }
  waiting_.clear();
}

// Opens the file for the first time, or again, if it is not the open file any more: an editor may have replaced it by a
// new file, or somebody may have moved or deleted it; then a new file gets the lines of the old one. If that fails, the
// old file stays open, as its lines may be nowhere else.
void MetricsLog::find_file() {
  if (file_ && file_->is_at(path_)) return;
  std::filesystem::create_directories(path_.parent_path());
  auto found = std::make_unique<File>(path_, O_RDWR | O_CREAT | O_APPEND);
  if (!file_) {
    std::ifstream before(path_);
    cut(*found, bytes_until(before, resumed_step_));
  } else if (!file_->is_at(path_) && found->size() == 0) {  // is_at() is asked again, as one stat may have failed
    waiting_.insert(0, file_->content());
    print_error(one_line(path_.string()) + ": was deleted or moved during the run: it is made anew, with all its lines");
  }
  file_ = std::move(found);
}
