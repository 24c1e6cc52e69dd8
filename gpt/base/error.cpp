#include "gpt/base/error.h"

#include <cstdint>

#include <unistd.h>

namespace {

// The number of bytes of the UTF-8 character that `text` begins with; 0 if it is a control character or not valid
// UTF-8.
size_t printable_bytes(std::string_view text) {
  const uint32_t first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return first >= 0x20 && first != 0x7f;
  if (first < 0xc2 || first > 0xf4) return 0;
  const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (bytes > text.size()) return 0;
  uint32_t code_point = first & (0x7f >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((text[i] & 0xc0) != 0x80) return 0;
    code_point = code_point << 6 | (text[i] & 0x3f);
  }
  constexpr uint32_t least[] = {0, 0, 0xa0, 0x800, 0x10000};  // smallest printable code point by number of bytes
  const bool surrogate = code_point >= 0xd800 && code_point < 0xe000;
  return code_point >= least[bytes] && code_point <= 0x10ffff && !surrogate ? bytes : 0;
}

}  // namespace

std::string one_line(std::string_view text) {
  std::string line;
  while (!text.empty()) {
    const size_t bytes = printable_bytes(text);
    line += bytes ? text.substr(0, bytes) : "?";
    text.remove_prefix(bytes ? bytes : 1);
  }
  return line;
}

std::string excerpt(std::string_view text) {
  constexpr size_t longest = 160;
  return "'" + one_line(text.substr(0, longest)) + (text.size() > longest ? "...'" : "'");
}

void print_error(const std::string& text) {
  const std::string message = "train_gpt: " + text + "\n";
  (void)!write(STDERR_FILENO, message.data(), message.size());  // one call, because ranks share a terminal
}
