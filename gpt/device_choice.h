// Chooses one of the devices that a rank sees: rank number i of a host takes device i. Some launchers choose
// themselves: they set CUDA_VISIBLE_DEVICES so that each rank sees only its own device, or sees it first (0,1,2 for one
// rank, 1,2,0 for the next). Then each rank takes its first device.
#pragma once

#include <string>
#include <vector>

// The host and the devices of a rank, as it tells the other ranks.
struct SeenDevices {
  std::string host, boot;  // host name and boot_id(), because two hosts may have the same name
  int count = 0;
  std::string first;  // UUID of the first device

  bool same_host(const SeenDevices& other) const { return host == other.host && boot == other.boot; }
};

// The text that ranks send each other.
std::string text_of(const SeenDevices& seen);
SeenDevices seen_devices(const std::string& text);

struct DeviceChoice {
  int device = 0;
  bool shared = false;  // other ranks use the same device
};

// An id that is different on every host, and after every boot of the host.
std::string boot_id();

// all: by rank. Fails if a host has more ranks than devices and may_share is false.
DeviceChoice choose_device(const std::vector<SeenDevices>& all, int rank, bool may_share);
