#include "runtime/metrics.h"

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "runtime/error.h"

namespace {

std::string metrics_text(const nlohmann::ordered_json& value) {
  if (value.is_number_float()) {
    if (!std::isfinite(value.get<double>())) return "null";
    char digits[32];  // to_chars, unlike printf, knows no locale
    const auto end = std::to_chars(digits, digits + sizeof digits, value.get<double>(), std::chars_format::general, 9);
    return {digits, end.ptr};
  }
  if (!value.is_structured()) return value.dump();
  std::string text;
  for (const auto& [key, element] : value.items())
    text += (text.empty() ? "" : ", ") + (value.is_object() ? nlohmann::json(key).dump() + ": " : "") + metrics_text(element);
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

// Length of the leading lines that are whole and of steps up to `step`; after a crash anything may follow.
size_t bytes_until(const std::filesystem::path& path, size_t step) {
  std::ifstream file(path);
  size_t bytes = 0;
  for (std::string line; std::getline(file, line) && !file.eof(); bytes += line.size() + 1) {
    nlohmann::json fields = nlohmann::json::parse(line, nullptr, false);
    if (!fields.is_object() || !fields.contains("step") || !fields["step"].is_number_unsigned()) break;
    if (fields["step"] > step) break;
  }
  return bytes;
}

}  // namespace

std::string metrics_line(const nlohmann::ordered_json& fields) { return metrics_text(fields) + "\n"; }

MetricsLog::MetricsLog(const std::filesystem::path& path, std::optional<size_t> resumed_step)
    : file_(path, O_WRONLY | O_CREAT | O_APPEND) {
  cut(resumed_step ? bytes_until(path, *resumed_step) : 0);
}

void MetricsLog::append(const nlohmann::ordered_json& fields) {
  std::string line = metrics_line(fields);
  size_t before = file_.size();
  ssize_t written = ::write(file_.descriptor(), line.data(), line.size());
  if (written == ssize_t(line.size())) return;
  std::string reason = written < 0 ? std::strerror(errno) : "no space for a whole line";
  cut(before);
  fail(file_.path(), ": cannot write: ", reason, ": free space, and continue with --resume");
}

void MetricsLog::cut(size_t bytes) {
  if (ftruncate(file_.descriptor(), off_t(bytes)) == 0) return;
  fail(file_.path(), ": cannot truncate: ", std::strerror(errno));
}
