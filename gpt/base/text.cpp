#include "gpt/base/text.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <random>

#include <unistd.h>

#include <xxhash.h>

std::string formatted(const char* format, ...) {
  char text[1024];
  std::va_list values;
  va_start(values, format);
  const int length = std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return {text, std::min(size_t(length), sizeof text - 1)};
}

std::vector<std::string> words_of(const std::string& list) {
  std::vector<std::string> words(1);
  for (char c : list)
    if (c == ',') words.emplace_back();
    else words.back() += c;
  return words;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0, last; i < ranks.size(); i = last + 1) {
    for (last = i; last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1;) ++last;
    if (last == i + 1) last = i;
    if (i) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text.append("-").append(std::to_string(ranks[last]));
  }
  return text;
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string hexadecimal(uint64_t number) { return formatted("%016llx", static_cast<unsigned long long>(number)); }

std::string random_digits() {
  std::random_device random("/dev/urandom");
  return formatted("%08x%08x%08x%08x", random(), random(), random(), random());
}

std::string xxh3(std::string_view bytes) { return hexadecimal(XXH3_64bits(bytes.data(), bytes.size())); }
