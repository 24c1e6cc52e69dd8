// Which of the devices that it sees a rank takes: the one of its place among the ranks of its host. Some launchers choose
// themselves: they set CUDA_VISIBLE_DEVICES so that each rank sees its own device alone, or first (0,1,2 for one rank,
// 1,2,0 for the next). Then it is the first.
#pragma once

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "runtime/error.h"

// What a rank tells the others of its host and devices.
struct SeenDevices {
  std::string host, boot;  // two hosts may have one name
  int count = 0;
  std::string first;  // UUID of the first device

  bool same_host(const SeenDevices& other) const { return host == other.host && boot == other.boot; }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SeenDevices, host, boot, count, first)

struct DeviceChoice {
  int device = 0;
  bool shared = false;  // with other ranks
};

// Different on every host, and after every start of it.
inline std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

// `all`: by rank. Fails if a host has more ranks than devices and they may not share.
inline DeviceChoice choose_device(const std::vector<SeenDevices>& all, int rank, bool may_share) {
  const SeenDevices& mine = all[size_t(rank)];
  int place = 0, neighbours = 0;
  std::set<std::string> distinct;
  for (const SeenDevices& other : all) {
    if (!mine.same_host(other)) continue;
    if (&other < &mine) ++place;
    ++neighbours;
    distinct.insert(other.first);
  }
  if (int(distinct.size()) == neighbours) return {};  // the launcher chose
  const bool shared = neighbours > mine.count;
  if (shared && !may_share)
    fail(mine.host, " has ", neighbours, " ranks and ", mine.count, mine.count == 1 ? " GPU" : " GPUs",
         ": start fewer ranks there, or let them share with --share-gpu (slow; for tests)");
  return {place % mine.count, shared};
}
