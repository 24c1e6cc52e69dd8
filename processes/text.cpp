#include "processes/text.h"

#include <cstdio>

#include <unistd.h>

#include <xxhash.h>

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string hexadecimal(uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

std::string xxh3(std::string_view bytes) { return hexadecimal(XXH3_64bits(bytes.data(), bytes.size())); }
