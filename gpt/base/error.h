// Errors of the whole program: an exception with one clear line, which names the thing, the value and the cure. main()
// prints it and ends with a non-zero exit code.
#pragma once

#include <exception>
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

// One text of these parts.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << printable(parts));
  return text.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(concat(parts...));
}

// A wrong option: exit code 2
struct UsageError : std::runtime_error {
  using runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void usage_error(const Parts&... parts) {
  throw UsageError(concat(parts...));
}

// An error stays one line of valid UTF-8 even if a file name in it is not: every other byte becomes a question mark.
std::string one_line(std::string_view text);

// Makes text from an untrusted file fit for an error line: in quotes, printable, not too long.
std::string excerpt(std::string_view text);

void print_error(const std::string& text);

// Does the work. Returns the error message if it fails; empty: it is done.
template <class Work>
std::string attempt(Work work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}
