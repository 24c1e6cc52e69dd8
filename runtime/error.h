// Errors of the whole program: one exception that carries one clear line. The line names the thing, the value
// and the cure; main() prints it and ends with a non-zero exit code.
#pragma once

#include <unistd.h>

#include <cctype>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

template <class Part>
const Part& printable(const Part& part) {
  return part;
}

// The standard library would print a path in quotes.
inline std::string printable(const std::filesystem::path& path) { return path.string(); }

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << printable(parts));
  throw std::runtime_error(text.str());
}

// An error stays one line even if a file name in it does not.
inline std::string one_line(std::string text) {
  for (char& c : text)
    if (std::iscntrl(static_cast<unsigned char>(c))) c = '?';
  return text;
}

// Text from a file that nobody vouches for, made fit for an error line: in quotes, printable, not too long.
inline std::string excerpt(std::string_view text) {
  constexpr size_t longest = 160;
  std::string result = "'";
  for (unsigned char c : text.substr(0, longest)) result += c < 0x20 || c == 0x7f ? '?' : char(c);
  return result + (text.size() > longest ? "...'" : "'");
}

inline void print_error(const std::string& text) {
  const std::string message = "train_gpt: " + text + "\n";
  (void)!write(STDERR_FILENO, message.data(), message.size());  // one call: ranks share a terminal
}
