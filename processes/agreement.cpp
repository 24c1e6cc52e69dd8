#include "processes/agreement.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>

#include "processes/error.h"

namespace {

// Texts of any bytes but NUL, which ends each of them.
std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += text + '\0';
  return all;
}

std::string listed(std::string_view joined) {
  std::string list;
  for (size_t end; (end = joined.find('\0')) != joined.npos; joined.remove_prefix(end + 1))
    list += (list.empty() ? "" : ", ") + excerpt(joined.substr(0, end));
  return list.empty() ? "nothing" : list;
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
  require_agreement(control, name, std::vector<std::string>{mine}, cure);
}

void require_agreement(Control& control, const std::string& name, const std::vector<std::string>& mine,
                       const std::string& cure) {
  const std::vector<std::string> all = control.all_gather(joined(mine));
  for (int rank = 1; rank < control.size(); ++rank)
    if (all[size_t(rank)] != all[0])
      fail("ranks differ: ", name, " is ", listed(all[0]), " on rank 0 (", control.host(0), ") and ",
           listed(all[size_t(rank)]), " on rank ", rank, " (", control.host(rank), "): ", cure);
}
