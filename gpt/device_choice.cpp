#include "gpt/device_choice.h"

#include <fstream>
#include <set>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SeenDevices, host, boot, count, first)

std::string text_of(const SeenDevices& seen) { return nlohmann::json(seen).dump(); }

SeenDevices seen_devices(const std::string& text) { return nlohmann::json::parse(text); }

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

DeviceChoice choose_device(const std::vector<SeenDevices>& all, int rank, bool may_share) {
  const SeenDevices& mine = all[size_t(rank)];
  int place = 0, neighbours = 0;
  std::set<std::string> distinct;
  for (const SeenDevices& other : all) {
    if (!mine.same_host(other)) continue;
    if (&other < &mine) ++place;
    ++neighbours;
    distinct.insert(other.first);
  }
  if (int(distinct.size()) == neighbours) return {};  // the launcher chose: each rank takes its first device
  const bool shared = neighbours > mine.count;
  if (shared && !may_share)
    fail(mine.host, " has ", neighbours, " ranks and ", mine.count, mine.count == 1 ? " GPU" : " GPUs",
         ": start fewer ranks there, or let them share with --share-gpu (slow; for tests)");
  return {place % mine.count, shared};
}
