#include "gpt/agreement.h"

#include <filesystem>
#include <fstream>
#include <string_view>

#include "gpt/base/error.h"
#include "gpt/base/text.h"

namespace {

// Joins texts, each followed by NUL. The texts may hold any byte except NUL.
std::string ended_by_nul(const std::vector<std::string>& texts) {
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

std::string program_checksum() {
  std::string bytes(std::filesystem::file_size("/proc/self/exe"), '\0');
  std::ifstream("/proc/self/exe", std::ios::binary).read(bytes.data(), std::streamsize(bytes.size()));
  return xxh3(bytes);
}

void require_agreement(Ranks& ranks, const std::string& name, const std::vector<std::string>& mine,
                       const std::string& cure, double leeway) {
  const std::vector<std::string> all = ranks.all_gather(ended_by_nul(mine), leeway);
  for (int rank = 1; rank < ranks.size(); ++rank)
    if (all[size_t(rank)] != all[0])
      fail("ranks differ: ", name, " is ", listed(all[0]), " on rank 0 (", ranks.host(0), ") and ",
           listed(all[size_t(rank)]), " on rank ", rank, " (", ranks.host(rank), "): ", cure);
}
