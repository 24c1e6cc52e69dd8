// Text for the terminal: numbers with separators, durations, and a progress bar under the log if the terminal is
// interactive.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include <unistd.h>

inline std::string with_commas(double number) {
  char digits[64];
  const int length = std::snprintf(digits, sizeof digits, "%.0f", number);
  std::string text;
  for (int i = 0; i < length; ++i) {
    if (i > 0 && digits[i - 1] != '-' && (length - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

inline std::string duration(double seconds) {
  const long s = long(seconds + 0.5);
  char text[64];
  if (s >= 3600) std::snprintf(text, sizeof text, "%ldh%02ldm", s / 3600, s / 60 % 60);
  else std::snprintf(text, sizeof text, "%ldm%02lds", s / 60, s % 60);
  return text;
}

// Rows below each other, the first one with the titles; columns are aligned on their right, but the last one on its left.
// indent: of all rows but the first.
inline std::string table_text(const std::vector<std::vector<std::string>>& rows, size_t indent) {
  std::string text;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (r > 0) text += '\n' + std::string(indent, ' ');
    for (size_t c = 0; c < rows[r].size(); ++c) {
      size_t width = 0;
      for (const auto& row : rows) width = std::max(width, row[c].size());
      const std::string space(c + 1 < rows[r].size() ? width - rows[r][c].size() : 0, ' ');
      text += (c > 0 ? "  " : "") + space + rows[r][c];
    }
  }
  return text;
}

// One line at the bottom of an interactive terminal; log lines go above it.
class ProgressBar {
 public:
  // wanted: false with several ranks, because mpirun gives rank 0 a terminal of its own that perhaps nobody reads.
  ProgressBar(size_t steps, bool wanted) : steps_(steps), interactive_(wanted && isatty(STDOUT_FILENO)) {}
  ~ProgressBar() { hide(); }

  void show(size_t step, double seconds_left) {
    if (!interactive_) return;
    constexpr int width = 40;
    const int filled = steps_ ? int(width * step / steps_) : width;
    std::printf("\r\033[K[%s%s] %zu/%zu, %s left", std::string(size_t(filled), '#').c_str(),
                std::string(size_t(width - filled), '.').c_str(), step, steps_, duration(seconds_left).c_str());
    std::fflush(stdout);
    visible_ = true;
  }

  void hide() {
    if (visible_) std::printf("\r\033[K");
    visible_ = false;
  }

 private:
  size_t steps_;
  bool interactive_, visible_ = false;
};
