// GPUs by name, from NVIDIA's data sheets: MFU is computed from their peak rates, and plans from all columns.
#pragma once

#include <algorithm>
#include <sstream>
#include <string>

#include "gpt/base/text.h"

// The kernels that a device runs fastest: with the tensor cores' instructions of Hopper, or of Blackwell in data
// centres. All others multiply as Ampere does, also Blackwell's RTX cards. cpu: the CPU device
enum class Generation { ampere, hopper, blackwell, cpu };
inline constexpr const char* generations[] = {"ampere", "hopper", "blackwell", "cpu"};

struct DeviceSheet {
  const char* name;
  double bf16, fp32;  // TFLOP/s, dense, sums in fp32; fp32 without TF32
  double bandwidth;   // of memory, TB/s
  double memory;      // GiB that the driver reports
  Generation generation = Generation::ampere;
  bool is_later = false;  // than Ampere, whose generation of kernels it shares
  double host = 32;       // to the host's memory in one direction, GB/s: PCIe 4.0 x16; 5.0: 64; NVLink-C2C: 450

  // Products in eight bits, at twice the rate of bf16
  bool has_fp8() const { return is_later || generation == Generation::hopper || generation == Generation::blackwell; }
};

// The first match counts, so longer names come first.
inline constexpr DeviceSheet device_sheets[] = {
    {"GB300", 2500, 80, 8.0, 277.0, Generation::blackwell, false, 450},
    {"GB200", 2500, 80, 8.0, 185.0, Generation::blackwell, false, 450},
    {"B300", 2250, 77, 8.0, 268.0, Generation::blackwell, false, 64},
    {"B200", 2250, 80, 8.0, 178.3, Generation::blackwell, false, 64},
    {"GH200", 989, 67, 4.0, 94.5, Generation::hopper, false, 450},
    {"H200 NVL", 835, 60, 4.8, 139.8, Generation::hopper, false, 64},
    {"H200", 989, 67, 4.8, 139.8, Generation::hopper, false, 64},
    {"H100 PCIe", 756, 51, 2.0, 79.1, Generation::hopper, false, 64},
    {"H100 NVL", 835, 60, 3.9, 93.1, Generation::hopper, false, 64},
    {"H100", 989, 67, 3.35, 79.1, Generation::hopper, false, 64},
    {"H800", 989, 67, 3.35, 79.1, Generation::hopper, false, 64},
    {"A100-80", 312, 19.5, 2.039, 79.1},
    {"A100-40", 312, 19.5, 1.555, 39.4},
    {"A800", 312, 19.5, 2.039, 79.1},
    {"A40", 149.7, 37.4, 0.696, 44.6},
    {"A10", 125, 31.2, 0.6, 22.0},
    {"L40S", 362, 91.6, 0.864, 44.4, Generation::ampere, true},
    {"L4", 121, 30.3, 0.3, 22.0, Generation::ampere, true},
    {"GB10", 125, 31, 0.273, 119.6, Generation::ampere, true},
    {"RTX PRO 6000", 503.8, 126, 1.792, 95.0, Generation::ampere, true, 64},
    {"RTX 6000 Ada", 364.2, 91.1, 0.96, 47.4, Generation::ampere, true},
    {"RTX A6000", 154.8, 38.7, 0.768, 47.4},
    {"RTX 5090", 209.5, 104.8, 1.792, 31.4, Generation::ampere, true, 64},
    {"RTX 4090", 165.2, 82.6, 1.008, 23.5, Generation::ampere, true},
    {"RTX 3090", 71, 35.6, 0.936, 23.6}};

// Does the name that a driver reports have each word of the table's? "NVIDIA A100-SXM4-80GB": A100-80. A laptop's is another device.
inline bool is_called(std::string reported, std::string name) {
  std::ranges::replace(reported, '-', ' ');
  std::ranges::replace(name, '-', ' ');
  std::istringstream words(name);
  const auto has = [&](const std::string& word) { return (' ' + reported + ' ').find(' ' + word) != std::string::npos; };
  for (std::string word; words >> word;)
    if (!has(word + ' ') && !has(word + "GB ")) return false;
  return !has("Laptop ");
}

// The device of this name, in this table or by its driver; null: it is not known.
inline const DeviceSheet* find_device(const std::string& name) {
  const auto found = std::ranges::find_if(device_sheets, [&](const DeviceSheet& sheet) { return is_called(name, sheet.name); });
  return found == std::end(device_sheets) ? nullptr : found;
}

// The peak FLOP/s of this device and dtype, 0 if unknown.
inline double peak_flops(const std::string& device, bool is_fp32) {
  const DeviceSheet* sheet = find_device(device);
  return sheet ? 1e12 * (is_fp32 ? sheet->fp32 : sheet->bf16) : 0;
}

// Advice for a run in this storage type, if another one is faster on this device; else empty.
inline std::string dtype_hint(const std::string& device, const std::string& dtype) {
  const double times = peak_flops(device, false) / peak_flops(device, true);  // NaN if the device is not known
  if (dtype != "fp32" || !(times > 1)) return "";
  return formatted("hint      products of bf16 have %.3g times the peak of fp32 on this device: try --dtype bf16", times);
}
