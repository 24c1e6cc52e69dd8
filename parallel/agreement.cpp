#include "parallel/agreement.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

#include "runtime/error.h"

namespace {

// `mine`: an object.
void require(Control& control, const nlohmann::json& mine, const std::string& cure) {
  const std::vector<std::string> all = control.all_gather(mine.dump());
  const nlohmann::json first = nlohmann::json::parse(all[0]);
  for (int rank = 1; rank < control.size(); ++rank) {
    const nlohmann::json other = nlohmann::json::parse(all[size_t(rank)]);
    for (const auto& [key, value] : first.items())
      if (other.value(key, nlohmann::json()) != value)
        fail("ranks differ: ", key, " is ", value.dump(), " on rank 0 (", control.host(0), ") and ",
             other.value(key, nlohmann::json()).dump(), " on rank ", rank, " (", control.host(rank), "): ", cure);
  }
}

}  // namespace

std::string checksum(const void* data, size_t bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  const char* from = static_cast<const char*>(data);
  for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, from + i, std::min(sizeof word, bytes - i));
    hash = (hash ^ word) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

std::string program_checksum() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  return checksum(bytes.data(), bytes.size());
}

void require_agreement(Control& control, const std::string& name, const std::string& mine, const std::string& cure) {
  require(control, {{name, mine}}, cure);
}

void require_agreement(Control& control, const std::string& name, const std::vector<std::string>& mine,
                       const std::string& cure) {
  require(control, {{name, mine}}, cure);
}
