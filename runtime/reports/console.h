// Text for the terminal: numbers with separators, durations, and a progress bar under the log if the terminal is
// interactive.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include <langinfo.h>
#include <locale.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "gpt/base/text.h"

inline std::string with_commas(double number) {
  std::string digits = formatted("%.0f", number);
  for (int at = int(digits.size()) - 3; at > (digits[0] == '-'); at -= 3) digits.insert(size_t(at), ",");
  return digits;
}

inline std::string duration(double seconds) {
  const long s = long(seconds + 0.5);
  return s >= 3600 ? formatted("%ldh%02ldm", s / 3600, s / 60 % 60) : formatted("%ldm%02lds", s / 60, s % 60);
}

inline void print_line(const std::string& text) { std::puts(text.c_str()); }

// The word in a shell's quotes, if it needs them.
inline std::string quoted(const std::string& word) {
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=,:+-";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + '\'';
}

// A command line of these words, but the options that are named in `left_out`, and their values.
inline std::string command_without(const std::set<std::string>& left_out, const std::vector<std::string>& words) {
  std::string text;
  bool leaves_out = false;
  for (const std::string& word : words) {
    if (word.starts_with("--")) leaves_out = left_out.contains(word.substr(0, word.find('=')));
    if (!leaves_out) text += (text.empty() ? "" : " ") + quoted(word);
  }
  return text;
}

// Rows below each other, the first one with the titles, behind a word of ten characters; columns are aligned on their
// right, but the last one on its left.
inline std::string table_text(const std::vector<std::vector<std::string>>& rows) {
  std::string text;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (r > 0) text += '\n' + std::string(10, ' ');
    for (size_t c = 0; c < rows[r].size(); ++c) {
      size_t width = 0;
      for (const auto& row : rows) width = std::max(width, row[c].size());
      const std::string space(c + 1 < rows[r].size() ? width - rows[r][c].size() : 0, ' ');
      text += (c > 0 ? "  " : "") + space + rows[r][c];
    }
  }
  return text;
}

// A curve of all values so far that fits into a line of text.
class Sparkline {
 public:
  void add(double value) {
    if (std::isfinite(value)) sums_.push_back(sums_.back() + value);
  }

  // A sparkline of `width` characters, from the first value to the last, each the mean of its share of values; empty
  // without values.
  std::string text(size_t width, bool utf8) const {
    const size_t count = sums_.size() - 1;
    std::vector<double> heights(count > 0 ? width : 0);
    for (size_t i = 0; i < heights.size(); ++i) {
      const size_t begin = i * count / width, end = std::max(begin + 1, (i + 1) * count / width);
      heights[i] = (sums_[end] - sums_[begin]) / double(end - begin);
    }
    std::string text;
    for (const double height : heights) {
      const auto [least, most] = std::ranges::minmax(heights);
      const size_t level = most > least ? size_t(7.999 * (height - least) / (most - least)) : 0;
      text += utf8 ? std::string("▁▂▃▄▅▆▇█").substr(3 * level, 3) : std::string(1, "_.:-=+*#"[level]);
    }
    return text;
  }

 private:
  std::vector<double> sums_ = {0};  // sums of the first 0, 1, 2, ... values
};

// A progress bar with the curve of the losses, in a terminal of `columns` columns. The last column stays free, because
// some terminals begin a new line after it.
inline std::string progress_text(size_t step, size_t steps, double seconds_left, const Sparkline& losses, size_t columns,
                                 bool utf8) {
  const std::string numbers = std::to_string(step) + '/' + std::to_string(steps) + ", " + duration(seconds_left) + " left";
  const size_t room = columns - std::min(columns, numbers.size() + 5);  // beside brackets, spaces and the last column
  const size_t curve = std::min<size_t>(room / 2, 24), width = std::min<size_t>(room - curve, 40);
  if (width < 4) return numbers.substr(0, std::max<size_t>(columns, 1) - 1);
  const size_t filled = steps ? width * step / steps : width;
  return '[' + std::string(filled, '#') + std::string(width - filled, '.') + "] " + numbers + ' ' + losses.text(curve, utf8);
}

inline bool terminal_has_utf8() {
  const locale_t locale = newlocale(LC_CTYPE_MASK, "", nullptr);  // the environment's; null: it is not installed
  const bool utf8 = locale && std::string(nl_langinfo_l(CODESET, locale)) == "UTF-8";
  if (locale) freelocale(locale);
  return utf8;
}

// One line at the bottom of an interactive terminal; log lines go above it.
class ProgressBar {
 public:
  // wanted: false with several ranks, because mpirun gives rank 0 a terminal of its own that perhaps nobody reads.
  ProgressBar(size_t steps, bool wanted) : steps_(steps), interactive_(wanted && isatty(STDOUT_FILENO)) {}
  ~ProgressBar() { hide(); }

  void add(double loss) {
    if (interactive_) losses_.add(loss);
  }

  void show(size_t step, double seconds_left) {
    if (!interactive_) return;
    winsize size = {};
    ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    const size_t columns = size.ws_col ? size.ws_col : 80;
    std::printf("\r\033[K%s", progress_text(step, steps_, seconds_left, losses_, columns, utf8_).c_str());
    std::fflush(stdout);
    visible_ = true;
  }

  void hide() {
    if (visible_) std::printf("\r\033[K");
    visible_ = false;
  }

 private:
  size_t steps_;
  bool interactive_, utf8_ = terminal_has_utf8(), visible_ = false;
  Sparkline losses_;
};
