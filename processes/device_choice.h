// Which of the devices that it sees a rank takes: the one of its place among the ranks of its host. Some launchers choose
// themselves: they set CUDA_VISIBLE_DEVICES so that each rank sees its own device alone, or first (0,1,2 for one rank,
// 1,2,0 for the next). Then it is the first.
#pragma once

#include <string>
#include <vector>

// What a rank tells the others of its host and devices.
struct SeenDevices {
  std::string host, boot;  // two hosts may have one name
  int count = 0;
  std::string first;  // UUID of the first device

  bool same_host(const SeenDevices& other) const { return host == other.host && boot == other.boot; }
};

// As ranks tell one another.
std::string text_of(const SeenDevices& seen);
SeenDevices seen_devices(const std::string& text);

struct DeviceChoice {
  int device = 0;
  bool shared = false;  // with other ranks
};

// Different on every host, and after every start of it.
std::string boot_id();

// `all`: by rank. Fails if a host has more ranks than devices and they may not share.
DeviceChoice choose_device(const std::vector<SeenDevices>& all, int rank, bool may_share);
