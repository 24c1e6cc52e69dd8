// GPUs by name, from NVIDIA's data sheets: MFU is computed with their peak rates, and plans with all of it.
#pragma once

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string>

struct DeviceSheet {
  const char* name;
  double bf16, fp32;  // TFLOP/s, dense; fp32 without TF32
  double bandwidth;   // of memory, TB/s
  double memory;      // GiB that the driver reports
};

// The first match counts, so longer names come first.
inline constexpr DeviceSheet device_sheets[] = {
    {"B200", 2250, 80, 8.0, 178.3},       {"GH200", 989, 67, 4.0, 94.5},      {"H200 NVL", 835, 60, 4.8, 139.8},
    {"H200", 989, 67, 4.8, 139.8},        {"H100 PCIe", 756, 51, 2.0, 79.1},  {"H100 NVL", 835, 60, 3.9, 93.1},
    {"H100", 989, 67, 3.35, 79.1},        {"H800", 989, 67, 3.35, 79.1},      {"A100-80", 312, 19.5, 2.039, 79.1},
    {"A100-40", 312, 19.5, 1.555, 39.4},  {"A800", 312, 19.5, 2.039, 79.1},   {"L40S", 362, 91.6, 0.864, 44.4},
    {"RTX 4090", 165.2, 82.6, 1.008, 23.5}, {"RTX 3090", 71, 35.6, 0.936, 23.6}, {"L4", 121, 30.3, 0.3, 22.0}};

// Does the name that a driver reports have each word of the table's? "NVIDIA A100-SXM4-80GB": A100-80.
inline bool is_called(std::string reported, std::string name) {
  std::ranges::replace(reported, '-', ' ');
  std::ranges::replace(name, '-', ' ');
  std::istringstream words(name);
  const auto has = [&](const std::string& word) { return (' ' + reported + ' ').find(' ' + word) != std::string::npos; };
  for (std::string word; words >> word;)
    if (!has(word + ' ') && !has(word + "GB ")) return false;
  return true;
}

// The device that is called so, in this table or by its driver; null: it is not known.
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
  char text[128];
  std::snprintf(text, sizeof text, "hint      products of bf16 have %.3g times the peak of fp32 on this device: try --dtype bf16", times);
  return text;
}
