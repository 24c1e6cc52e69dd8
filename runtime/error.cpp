#include "runtime/error.h"

#include <cctype>
#include <stdexcept>

#include <unistd.h>

void fail_with(const std::string& text) { throw std::runtime_error(text); }

std::string one_line(std::string text) {
  for (char& c : text)
    if (std::iscntrl(static_cast<unsigned char>(c))) c = '?';
  return text;
}

std::string excerpt(std::string_view text) {
  constexpr size_t longest = 160;
  std::string result = "'";
  for (unsigned char c : text.substr(0, longest)) result += c < 0x20 || c == 0x7f ? '?' : char(c);
  return result + (text.size() > longest ? "...'" : "'");
}

void print_error(const std::string& text) {
  const std::string message = "train_gpt: " + text + "\n";
  (void)!write(STDERR_FILENO, message.data(), message.size());  // one call: ranks share a terminal
}
